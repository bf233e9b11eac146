import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.errors import InputError
from mlm_common.tokenizer import save_tokenizer, vocabulary_size
from tests.fixtures import tiny_tokenizers
from tests.fixtures.plans import inputs_of
from tests.fixtures.tiny_corpus import wrapped
from train.config.learning import MaskingConfig
from train.tasks.heads import masked_lm_loss
from train.tasks.masked_lm import MaskedLanguageModeling

NUM_PREDICTIONS, VOCABULARY = 12, 7
WORDS = MaskingConfig(masking="whole_word", mlm_probability=0.3)


def rule_of(kind, folder, change=None):
    tokenizer = wrapped(tiny_tokenizers.KINDS[kind]())
    save_tokenizer(tokenizer, str(folder))
    if change is not None:
        starts = np.load(folder / "word_starts.npy")
        np.save(folder / "word_starts.npy", change(starts))
    return MaskedLanguageModeling.of(inputs_of(tokenizer, folder), WORDS).rule


def test_the_table_saved_with_the_tokenizer_tells_words(tmp_path):
    rule = rule_of("unigram", tmp_path, np.logical_not)
    assert (rule.masking, rule.mlm_probability) == ("whole_word", 0.3)
    np.testing.assert_array_equal(rule.word_starts, np.load(tmp_path / "word_starts.npy"))


def test_marks_tell_words_where_no_table_was_saved(tmp_path):
    expected = rule_of("wordpiece", tmp_path).word_starts
    tokenizer = wrapped(tiny_tokenizers.KINDS["wordpiece"]())
    rule = MaskedLanguageModeling.of(inputs_of(tokenizer, "some-one/on-the-hub"), WORDS).rule
    assert len(rule.word_starts) == len(expected) == vocabulary_size(tokenizer)


def test_tokenizers_that_do_not_tell_words_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"--masking whole_word needs .* has neither\. Use --masking token"):
        rule_of("words", tmp_path)
    with pytest.raises(InputError, match=r"each of the tokenizer's \d+ ids; .* has 7"):
        rule_of("unigram", tmp_path, lambda starts: starts[:7])
    with pytest.raises(InputError, match=r"each of the tokenizer's \d+ ids"):
        rule_of("unigram", tmp_path, lambda starts: np.append(starts, True))


def test_evaluation_masks_tokens_whatever_training_does():
    rule = MaskedLanguageModeling.of(inputs_of(wrapped(tiny_tokenizers.KINDS["unigram"]())), WORDS).evaluation_rule
    assert (rule.masking, rule.mlm_probability, rule.word_starts) == ("token", 0.15, None)
    assert (rule.mask_token_rate, rule.random_token_rate) == (0.8, 0.1)


def sums_and_gradient(logits, labels, weights, vocabulary_size=None):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        sums = masked_lm_loss(logits, labels, weights, vocabulary_size=vocabulary_size)
    return sums, tape.gradient(sums["loss"], logits)


compiled = tf.function(sums_and_gradient, jit_compile=True, autograph=False)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**20), spread=st.sampled_from([0, 1, 3, 60]), num_padding=st.sampled_from([0, 2]))
@pytest.mark.parametrize(("jit_compile", "dtype"), [(False, tf.float32), (False, tf.bfloat16), (True, tf.bfloat16)])
def test_it_is_the_library_s_cross_entropy_and_argmax(jit_compile, dtype, seed, spread, num_padding):
    """Whole numbers, so that many logits are the largest together; padding of the vocabulary is never predicted."""
    random = np.random.default_rng(seed)
    logits = tf.constant(random.integers(-spread, spread + 1, (NUM_PREDICTIONS, VOCABULARY)), dtype)
    labels = tf.constant(random.integers(VOCABULARY, size=NUM_PREDICTIONS), tf.int32)
    weights = tf.constant(random.integers(2, size=NUM_PREDICTIONS), tf.float32)
    exact = tf.cast(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(exact)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, exact)
        expected = tf.reduce_sum(losses * weights)

    padded = tf.concat([logits, tf.fill((NUM_PREDICTIONS, num_padding), tf.constant(60_000.0, dtype))], axis=1)
    compute = compiled if jit_compile else sums_and_gradient
    sums, gradient = compute(padded, labels, weights, VOCABULARY if num_padding else None)
    gradient, of_padding = gradient[:, :VOCABULARY], gradient[:, VOCABULARY:]
    assert not np.any(tf.cast(of_padding, tf.float32))

    np.testing.assert_allclose(sums["loss"], expected, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == dtype
    tolerance = 1e-5 if dtype == tf.float32 else 4e-3
    np.testing.assert_allclose(tf.cast(gradient, tf.float32), tape.gradient(expected, exact), atol=tolerance)
    is_correct = np.argmax(exact, axis=-1) == labels.numpy()
    assert float(sums["num_correct"]) == (is_correct * weights.numpy()).sum()
    assert float(sums["num_masked"]) == weights.numpy().sum()
