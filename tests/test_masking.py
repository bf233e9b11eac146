import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from train.masking import MaskedRows, collect_predictions, mask_row_by_content, mask_rows
from train.masking_rule import MaskingRule, num_prediction_slots

SPECIAL_IDS = (0, 1, 2, 3, 4)
MASK_ID = 4
SEED = tf.constant((7, 11), tf.int32)


def make_rule(mlm_probability=0.15, mask=0.8, random=0.1, special_ids=SPECIAL_IDS, vocabulary_size=1000):
    return MaskingRule(MASK_ID, special_ids, vocabulary_size, mlm_probability, mask, random)


def mask_all(input_ids, rule, seed=SEED):
    ids = tf.constant(input_ids, tf.int32)
    rows = mask_rows(ids, seed, rule, num_global_rows=ids.shape[0], first_row=0)
    return rows.input_ids.numpy(), rows.is_masked.numpy()


def random_rows(num_rows, length, low=5, high=1000):
    return np.random.default_rng(0).integers(low, high, (num_rows, length), dtype=np.int32)


ROWS = [[0, 10, 11, 2, 0, 12, 2, 1], [0, 13, 3, 14, 4, 15, 16, 2]]


def test_rate_1_masks_every_ordinary_token_and_no_special_one():
    seen, is_masked = mask_all(ROWS, make_rule(1.0, mask=1.0, random=0.0))
    assert seen.tolist() == [[0, 4, 4, 2, 0, 4, 2, 1], [0, 4, 3, 4, 4, 4, 4, 2]]
    assert is_masked.astype(int).tolist() == [[0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1, 1, 0]]


def test_rate_0_masks_nothing():
    seen, is_masked = mask_all(ROWS, make_rule(0.0))
    assert seen.tolist() == ROWS
    assert not is_masked.any()


def test_tokens_that_are_kept_are_predicted_all_the_same():
    seen, is_masked = mask_all(ROWS, make_rule(1.0, mask=0.0, random=0.0))
    assert seen.tolist() == ROWS
    assert is_masked.sum(axis=1).tolist() == [3, 4]


def test_random_replacements_are_never_special():
    special_ids = (0, 7, 8, 9, 19)
    seen, is_masked = mask_all(np.full((64, 64), 10), make_rule(1.0, 0.0, 1.0, special_ids, vocabulary_size=20))
    assert is_masked.all()
    assert set(np.unique(seen)) == set(range(20)) - set(special_ids)


def test_shares_of_a_seeded_draw():
    rows = random_rows(512, 128)
    seen, is_masked = mask_all(rows, make_rule())
    assert is_masked.mean() == pytest.approx(0.15, abs=0.005)
    assert np.mean(seen[is_masked] == MASK_ID) == pytest.approx(0.8, abs=0.01)
    assert np.mean(seen[is_masked] == rows[is_masked]) == pytest.approx(0.1, abs=0.01)
    replaced = seen[is_masked & (seen != MASK_ID) & (seen != rows)]
    assert replaced.mean() == pytest.approx((5 + 999) / 2, rel=0.03)
    # Every position of a row is as likely as any other: five standard deviations for the largest of 128.
    assert abs(is_masked.sum(axis=0) - 512 * 0.15).max() < 5 * np.sqrt(512 * 0.15 * 0.85)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 40),
    probability=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    seed=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1)),
    data=st.data(),
)
def test_masks_keep_the_rules_for_any_rows(length, probability, seed, data):
    rows = data.draw(st.lists(st.lists(st.integers(0, 30), min_size=length, max_size=length), min_size=1, max_size=4))
    rows = np.array(rows, np.int32)
    seen, is_masked = mask_all(rows, make_rule(probability, vocabulary_size=31), tf.constant(seed, tf.int32))
    assert not is_masked[np.isin(rows, SPECIAL_IDS)].any()
    assert (seen[~is_masked] == rows[~is_masked]).all()
    assert not np.isin(seen[is_masked], [0, 1, 2, 3]).any()


@settings(max_examples=50, deadline=None)
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
    ("probability", "num_tokens", "slots"),
    [(0.15, 8192, 1424), (0.15, 4096, 752), (1.0, 10, 10), (0.0, 64, 8), (0.4, 512, 272), (0.15, 4, 4)],
)
def test_numbers_of_slots_are_pinned(probability, num_tokens, slots):
    assert num_prediction_slots(num_tokens, probability) == slots


def test_masks_do_not_depend_on_how_the_batch_is_cut():
    rows = random_rows(8, 64)
    seen, _ = mask_all(rows, make_rule())
    parts = [
        mask_rows(tf.constant(rows[at : at + 2]), SEED, make_rule(), num_global_rows=8, first_row=tf.constant(at))
        for at in range(0, 8, 2)
    ]
    assert (np.concatenate([part.input_ids.numpy() for part in parts]) == seen).all()


def test_xla_draws_the_same_masks():
    ids = tf.constant(random_rows(4, 64))

    @tf.function(jit_compile=True)
    def compiled(ids):
        rows = mask_rows(ids, SEED, make_rule(), num_global_rows=4, first_row=0)
        return rows, collect_predictions(rows, 80)

    rows, predictions = compiled(ids)
    eager_rows = mask_rows(ids, SEED, make_rule(), num_global_rows=4, first_row=0)
    for eager, xla in zip(eager_rows, rows, strict=True):
        assert (eager.numpy() == xla.numpy()).all()
    for eager, xla in zip(collect_predictions(eager_rows, 80), predictions, strict=True):
        assert (eager.numpy() == xla.numpy()).all()


def test_masks_by_content_depend_on_the_row_alone():
    rows = tf.constant(random_rows(3, 64))
    backwards = tf.data.Dataset.from_tensor_slices(rows[::-1]).map(lambda row: mask_row_by_content(row, make_rule()))
    seen = [mask_row_by_content(row, make_rule()).input_ids.numpy() for row in rows]
    for row, expected in zip(backwards, seen[::-1], strict=True):
        assert (row.input_ids.numpy() == expected).all()
    assert ((seen[0] == MASK_ID) != (seen[1] == MASK_ID)).any()


def test_masks_of_a_seed_are_pinned():
    seen, _ = mask_all(np.arange(100, 164).reshape(2, 32), make_rule(0.3))
    assert np.flatnonzero(seen.ravel() != np.arange(100, 164)).tolist() == [
        0,
        2,
        7,
        9,
        11,
        16,
        20,
        21,
        23,
        24,
        25,
        33,
        42,
        46,
        48,
        49,
        56,
        61,
        62,
    ]
