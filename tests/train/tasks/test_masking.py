import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.arrays import assert_all_equal
from train.layers.random_bits import row_keys
from train.tasks.masking import MaskedRows, collect_predictions, mask_row_by_content, mask_rows, num_needed_slots
from train.tasks.masking_rule import MAX_UNIT_TOKENS, MaskingRule

SPECIAL_IDS = (0, 1, 2, 3, 4)
MASK_ID = 4
SEED = (7, 11)


def make_rule(
    mlm_probability=0.15, mask=0.8, random=0.1, special_ids=SPECIAL_IDS, vocabulary_size=1000, masking="token"
):
    """Words begin with ids that a multiple of 3 or special."""
    starts = np.arange(vocabulary_size) % 3 == 0
    starts[list(special_ids)] = True
    return MaskingRule(MASK_ID, special_ids, vocabulary_size, mlm_probability, mask, random, masking, starts)


def mask_all(input_ids, rule, seed=SEED):
    rows = mask_rows(tf.constant(input_ids, tf.int32), row_keys(seed, len(input_ids)), rule)
    return rows.input_ids.numpy(), rows.is_masked.numpy()


def random_rows(num_rows, length, low=5, high=1000):
    return np.random.default_rng(0).integers(low, high, (num_rows, length), dtype=np.int32)


ROWS = [[0, 10, 11, 2, 0, 12, 2, 1], [0, 13, 3, 14, 4, 15, 16, 2]]


ALL_MASKED = [[0, 4, 4, 2, 0, 4, 2, 1], [0, 4, 3, 4, 4, 4, 4, 2]]
ORDINARY = [[0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("rates", "expected", "predicted"),
    [((1.0, 1.0, 0.0), ALL_MASKED, ORDINARY), ((1.0, 0.0, 0.0), ROWS, ORDINARY), ((0.0,), ROWS, np.zeros((2, 8)))],
    ids=["all are masked", "all are kept", "none"],
)
@pytest.mark.parametrize("masking", MAX_UNIT_TOKENS)
def test_degenerate_rates_give_exact_arrays(masking, rates, expected, predicted):
    """Special tokens are never among those that are predicted."""
    seen, is_masked = mask_all(ROWS, make_rule(*rates, masking=masking))
    assert seen.tolist() == expected
    assert is_masked.astype(int).tolist() == np.asarray(predicted).tolist()


def test_random_replacements_are_never_special():
    special_ids = (0, 7, 8, 9, 19)
    seen, is_masked = mask_all(np.full((64, 64), 10), make_rule(1.0, 0.0, 1.0, special_ids, vocabulary_size=20))
    assert is_masked.all()
    assert set(np.unique(seen)) == set(range(20)) - set(special_ids)


@pytest.mark.parametrize("masking", MAX_UNIT_TOKENS)
@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_shares_of_a_seeded_draw(masking, probability):
    rows = random_rows(512, 128)
    seen, is_masked = mask_all(rows, make_rule(probability, masking=masking))
    units = MAX_UNIT_TOKENS[masking]
    # Five standard deviations if all units were as long as they may be.
    deviation = np.sqrt(probability * (1 - probability) * units / rows.size)
    assert is_masked.mean() == pytest.approx(probability, abs=5 * deviation)
    assert np.mean(seen[is_masked] == MASK_ID) == pytest.approx(0.8, abs=0.01 * np.sqrt(units))
    assert np.mean(seen[is_masked] == rows[is_masked]) == pytest.approx(0.1, abs=0.01 * np.sqrt(units))
    # Every position of a row is as likely as any other: five standard deviations for the largest of 128.
    deviation = np.sqrt(512 * probability * (1 - probability))
    assert abs(is_masked.sum(axis=0) - 512 * probability).max() < 5 * deviation


@pytest.mark.parametrize("masking", MAX_UNIT_TOKENS)
@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_replacements_of_a_seeded_draw_are_uniform(masking, probability):
    """Enough rows that 3 % of the mean are more than four standard deviations of it, for independent tokens."""
    rows = random_rows(4096, 128)
    seen, is_masked = mask_all(rows, make_rule(probability, masking=masking))
    replaced = seen[is_masked & (seen != MASK_ID) & (seen != rows)]
    assert replaced.mean() == pytest.approx((5 + 999) / 2, rel=0.03)  # of 5 to 999
    assert (replaced.min(), replaced.max()) == (5, 999)


@settings(max_examples=30)
@given(
    length=st.integers(1, 40),
    probability=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    masking=st.sampled_from(list(MAX_UNIT_TOKENS)),
    seed=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1)),
    data=st.data(),
)
def test_masks_keep_the_rules_for_any_rows(length, probability, masking, seed, data):
    rows = data.draw(st.lists(st.lists(st.integers(0, 30), min_size=length, max_size=length), min_size=1, max_size=4))
    rows = np.array(rows, np.int32)
    rule = make_rule(probability, vocabulary_size=31, masking=masking)
    seen, is_masked = mask_all(rows, rule, seed)
    assert not is_masked[np.isin(rows, SPECIAL_IDS)].any()
    assert (seen[~is_masked] == rows[~is_masked]).all()
    assert not np.isin(seen[is_masked], [0, 1, 2, 3]).any()


@settings(max_examples=50)
@given(is_masked=st.lists(st.booleans(), min_size=1, max_size=60), num_predictions=st.integers(1, 60))
def test_slots_hold_the_masked_tokens_in_order(is_masked, num_predictions):
    ids = np.arange(100, 100 + len(is_masked), dtype=np.int32)[np.newaxis]
    rows = MaskedRows(tf.constant(ids), tf.constant(ids), tf.constant([is_masked]))
    positions, labels, weights = (tensor.numpy() for tensor in collect_predictions(rows, num_predictions))
    expected = np.flatnonzero(is_masked)[:num_predictions]
    assert positions.shape == labels.shape == weights.shape == (num_predictions,)
    assert positions[weights == 1].tolist() == expected.tolist()
    assert labels[weights == 1].tolist() == (expected + 100).tolist()
    assert weights.sum() == len(expected)


@pytest.mark.parametrize(
    ("num_masked", "max_slots", "num_slots"),
    [
        (0, 96, 32),
        (1, 96, 32),
        (32, 96, 32),
        (33, 96, 64),
        (96, 96, 96),
        (97, 96, 96),
        (3, 8, 8),
        (9, 8, 8),
        (70, 72, 72),
    ],
)
def test_without_xla_there_are_slots_for_the_masked_tokens(num_masked, max_slots, num_slots):
    is_masked = tf.reshape(tf.range(120) < num_masked, (4, 30))
    assert int(num_needed_slots(is_masked, max_slots)) == num_slots


@pytest.mark.parametrize(
    ("probability", "masking", "num_tokens", "slots"),
    [
        *((0.15, masking, 8192, slots) for masking, slots in (("token", 1424), ("whole_word", 1792), ("span", 2136))),
        *((0.15, "token", num_tokens, slots) for num_tokens, slots in ((4096, 752), (4, 4))),
        (1.0, "token", 10, 10),
        (0.0, "token", 64, 8),
        (0.4, "token", 512, 272),
    ],
)
def test_numbers_of_slots_are_pinned(probability, masking, num_tokens, slots):
    assert make_rule(probability, masking=masking).num_prediction_slots(num_tokens) == slots


@pytest.mark.parametrize("num_tokens", [64, 512, 4096, 65_536])
@pytest.mark.parametrize(("masking", "max_unit_tokens"), MAX_UNIT_TOKENS.items())
@pytest.mark.parametrize("probability", [0.05, 0.15, 0.4, 0.9])
def test_slots_overflow_once_in_five_million_batches_at_most(num_tokens, masking, max_unit_tokens, probability):
    """The worst text has units of the greatest length alone; the number drawn is then exactly binomial."""
    num_units = math.ceil(num_tokens / max_unit_tokens)
    slots = make_rule(probability, masking=masking).num_prediction_slots(num_tokens)
    fitting = num_units if slots == num_tokens else slots // max_unit_tokens
    logs = [
        math.lgamma(num_units + 1) - math.lgamma(n + 1) - math.lgamma(num_units - n + 1)
        + n * math.log(probability) + (num_units - n) * math.log1p(-probability)
        for n in range(fitting + 1, num_units + 1)
    ]  # fmt: skip
    assert sum(math.exp(log) for log in logs) < 2e-7


@pytest.mark.parametrize("masking", MAX_UNIT_TOKENS)
def test_masks_do_not_depend_on_how_the_batch_is_cut(masking):
    rows = random_rows(8, 64)
    rule = make_rule(masking=masking)
    seen, _ = mask_all(rows, rule)
    for at in range(0, 8, 2):
        part = mask_rows(tf.constant(rows[at : at + 2]), row_keys(SEED, 2, tf.constant(at)), rule)
        np.testing.assert_array_equal(part.input_ids, seen[at : at + 2])


@pytest.mark.parametrize("masking", MAX_UNIT_TOKENS)
def test_xla_draws_the_same_masks(masking):
    ids = tf.constant(random_rows(4, 64))
    rule = make_rule(masking=masking)

    @tf.function(jit_compile=True)
    @tf.autograph.experimental.do_not_convert
    def compiled(ids):
        rows = mask_rows(ids, row_keys(SEED, 4), rule)
        return rows, collect_predictions(rows, 80)

    rows, predictions = compiled(ids)
    eager_rows = mask_rows(ids, row_keys(SEED, 4), rule)
    assert_all_equal(rows, eager_rows)
    assert_all_equal(predictions, collect_predictions(eager_rows, 80))


def test_masks_by_content_depend_on_the_row_alone():
    rows = tf.constant(random_rows(3, 64))
    backwards = tf.data.Dataset.from_tensor_slices(rows[::-1]).map(lambda row: mask_row_by_content(row, make_rule()))
    seen = [mask_row_by_content(row, make_rule()).input_ids.numpy() for row in rows]
    assert_all_equal((row.input_ids for row in backwards), seen[::-1])
    assert ((seen[0] == MASK_ID) != (seen[1] == MASK_ID)).any()


def test_masks_of_a_seed_are_pinned():
    seen, _ = mask_all(np.arange(100, 164).reshape(2, 32), make_rule(0.3))
    assert np.flatnonzero(seen.ravel() != np.arange(100, 164)).tolist() == [4, 5, 7, 8, 11, 12, 39, 48, 54]


@pytest.mark.parametrize("masking", ["whole_word", "span"])
def test_words_are_masked_as_a_whole(masking):
    rows = random_rows(64, 64)
    _, is_masked = mask_all(rows, make_rule(0.4, masking=masking))
    inside_word = (rows[:, 1:] % 3 != 0) & (rows[:, 1:] != 0)
    differs = is_masked[:, 1:] != is_masked[:, :-1]
    assert inside_word.mean() > 0.5
    # Only words of more than eight tokens, and spans of more than twenty, are masked in several units.
    assert differs[inside_word].mean() < 0.01
    assert differs[~inside_word].mean() > 0.1


def test_words_are_replaced_by_tokens_and_spans_as_a_whole():
    rows = np.full((256, 6), 7)
    rows[:, 0] = 6  # one word
    share_alike = {}
    for masking in ("whole_word", "span"):
        seen, is_masked = mask_all(rows, make_rule(1.0, 0.5, 0.0, masking=masking))
        assert is_masked.all()
        share_alike[masking] = (seen[:, 1:] == seen[:, 1:2]).all(axis=1).mean()
    assert share_alike["span"] == 1
    assert share_alike["whole_word"] == pytest.approx(2 * 0.5**5, abs=0.06)
