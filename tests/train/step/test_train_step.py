import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.arrays import assert_all_equal
from tests.fixtures.tiny_models import MASK, PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_steps import (
    LENGTH,
    MAX_GRAD_NORM,
    NO_DROPOUT,
    NUM_ROWS,
    RULE,
    BadOnOneReplica,
    batch_of,
    build,
    compiled_model,
    one_cpu,
    token_rows,
    train,
    two_cpus,
    weights,
)
from train.config.learning import OptimizationConfig
from train.config.settings import HardwareConfig
from train.layers.random_bits import row_keys
from train.step.optimizer import build_optimizer, global_norm
from train.step.train_step import PretrainingModel, set_precision
from train.tasks.heads import masked_lm_loss
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.masking import collect_predictions
from train.tasks.masking_rule import MaskingRule
from train.tasks.task import Mean


def test_loss_of_the_gathered_head_is_that_of_the_full_head():
    model = build(one_cpu())
    rows = model.prepare_batch(batch_of(token_rows()), 0)
    attended = tf.cast(rows.input_ids != PAD, tf.int32)
    logits = model.network({"input_ids": rows.input_ids, "attention_mask": attended}).logits
    labels, used = tf.reshape(rows.original_ids, (-1,)), tf.reshape(tf.cast(rows.is_masked, tf.float32), (-1,))
    full = {
        name: float(total)
        for name, total in masked_lm_loss(tf.reshape(logits, (len(labels), -1)), labels, used).items()
    }
    assert full["num_masked"] > 10
    assert {name: float(total) for name, total in model.evaluation_step(rows).items()} == pytest.approx(full, rel=1e-5)


def test_gradients_have_the_static_shapes_of_their_weights():
    """`--shard-optimizer` needs them. Without XLA, the head is in a conditional, which drops a sparse shape."""
    model, shapes = build(one_cpu()), []

    def trace(batch):
        gradients, _ = model._gradients(model.prepare_batch(batch, 0), row_keys((3,), NUM_ROWS, 0))
        shapes.extend(gradient.shape for gradient in gradients)

    tf.function(one_cpu().run, autograph=False).get_concrete_function(trace, args=(batch_of(token_rows()),))
    assert shapes == [variable.shape for variable in model.network.trainable_variables]


@pytest.fixture(scope="module")
def trained_plainly():
    """A model after three steps of one replica, without a graph or accumulation, its figures and weights."""
    tf.config.run_functions_eagerly(True)
    try:
        model = build(one_cpu())
        return model, train(model, token_rows(num_rows=32)), weights(model)
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize(
    ("strategy", "num_micro_batches", "jit_compile"),
    [(two_cpus, 2, False), pytest.param(one_cpu, 2, True, marks=pytest.mark.slow)],
)
def test_the_same_global_batch_gives_the_same_step(trained_plainly, strategy, num_micro_batches, jit_compile):
    _, expected_figures, expected_weights = trained_plainly
    assert expected_figures["grad_norm"] > MAX_GRAD_NORM  # so that clipping takes part
    rows = token_rows(num_rows=32)
    settings = {"num_micro_batches": num_micro_batches, "jit_compile": jit_compile, "steps_per_execution": 4}
    model = build(strategy(), model_type=BadOnOneReplica, **settings)
    assert train(model, rows) == pytest.approx(expected_figures, rel=1e-4)
    np.testing.assert_allclose(weights(model), expected_weights, atol=2e-5)

    assert not model.optimizer.is_stopped
    before = [value.numpy() for value in (*model.network.trainable_variables, *model.optimizer.variables)]
    figures = train(model, rows, num_steps=6)  # executions of 4 and of 2 steps
    assert model.optimizer.is_stopped
    assert not np.isfinite(figures["grad_norm"])
    assert int(model.optimizer.iterations.numpy()) == 3
    after = [value.numpy() for value in (*model.network.trainable_variables, *model.optimizer.variables)]
    assert_all_equal(after, before)


@pytest.mark.usefixtures("eagerly")
def test_without_masked_tokens_loss_is_0_and_weights_are_finite(trained_plainly):
    model, *_ = trained_plainly
    model.reset_means()
    figures = train(model, np.full((32, LENGTH), PAD, np.int32))
    assert figures == {"loss": 0.0, "masked_accuracy": 0.0, "grad_norm": 0.0}
    assert np.isfinite(weights(model)).all()


@pytest.mark.usefixtures("eagerly")
def test_clipping_scales_the_whole_gradient():
    rows = token_rows()
    clipped, free = (build(one_cpu(), max_grad_norm=norm) for norm in (1e-9, 0.0))
    for model in (clipped, free):
        # With epsilon far above the gradients, AdamW's update is proportional to them.
        model.optimizer.epsilon, model.optimizer.weight_decay = 1e3, 0.0
    before = weights(free)
    figures = train(free, rows, num_steps=1)
    assert train(clipped, rows, num_steps=1)["grad_norm"] == pytest.approx(figures["grad_norm"], rel=1e-4)
    assert np.abs(weights(free) - before).max() > 0
    assert np.abs(weights(clipped) - before).max() < 1e-6 * np.abs(weights(free) - before).max()


class TokensPerRow(MaskedLanguageModeling):
    """Another metric than the loss, which has another weight."""

    means = (MaskedLanguageModeling.means[0], Mean("masked_per_row", "num_masked", "num_rows"))

    def sums(self, network, rows, *, training):
        num_rows = tf.constant(float(len(rows.input_ids)))
        return {**super().sums(network, rows, training=training), "num_rows": num_rows}


@pytest.mark.usefixtures("eagerly")
def test_each_mean_is_divided_by_its_weight_and_the_gradient_by_that_of_the_loss():
    with one_cpu().scope():
        network = tiny_model("roberta", num_hidden_layers=1, **NO_DROPOUT)
        model = compiled_model(network, TokensPerRow(RULE, PAD))
    rows = model.prepare_batch(batch_of(token_rows()), 0)
    gradients, sums = model._gradients(rows, row_keys((3,), NUM_ROWS))
    num_masked = rows.is_masked.numpy().sum()
    assert train(model, token_rows(), num_steps=1) == pytest.approx(
        {
            "loss": float(sums["loss"]) / num_masked,
            "masked_per_row": num_masked / NUM_ROWS,
            "grad_norm": float(global_norm(gradients)) / num_masked,
        }
    )


@pytest.mark.parametrize(
    ("bfloat16", "is_compiled", "policy", "multiplies_in_bfloat16"),
    [(False, True, "float32", False), (True, True, "mixed_bfloat16", False), (True, False, "float32", True)],
)
def test_xla_computes_in_bfloat16_and_else_products_alone_do(bfloat16, is_compiled, policy, multiplies_in_bfloat16):
    set_precision(bfloat16=bfloat16, is_compiled=is_compiled)
    try:
        assert tf_keras.mixed_precision.global_policy().name == policy
        options = tf.config.optimizer.get_experimental_options()
        assert options["auto_mixed_precision_onednn_bfloat16"] is multiplies_in_bfloat16
    finally:
        set_precision()


@pytest.mark.usefixtures("eagerly")
def test_loss_is_float32_under_bfloat16():
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = build(one_cpu())
    rows = model.prepare_batch(batch_of(token_rows()), 0)
    assert model.network({"input_ids": rows.input_ids}).logits.dtype == tf.bfloat16
    sums = model.evaluation_step(rows)
    assert {value.dtype for value in sums.values()} == {tf.float32}
    assert {variable.dtype for variable in model.network.trainable_variables} == {tf.float32}
    assert train(model, token_rows())["loss"] > 0
    # A loss summed in bfloat16 would be a multiple of a sixteenth.
    assert float(sums["loss"]) % 0.0625 != 0


@pytest.mark.slow
def test_gradients_of_biases_in_bfloat16_are_those_in_float32():
    """Summed over 8,192 tokens, as wide as sums in bfloat16 lose most of their terms."""
    rows = np.random.default_rng(0).integers(5, VOCABULARY, (64, 128), dtype=np.int32)

    def bias_gradients(**hardware):
        config = HardwareConfig(**hardware)
        tf_keras.mixed_precision.set_global_policy("mixed_bfloat16" if config.bfloat16 else "float32")
        network = tiny_model("roberta", num_hidden_layers=1, max_position_embeddings=130, **NO_DROPOUT)
        model = PretrainingModel(network, MaskedLanguageModeling(RULE, PAD), seed=3)
        prepared = model.prepare_batch(batch_of(rows), 0)

        def gradients():
            return model._gradients(prepared, row_keys((3,), len(rows)))[0]

        model.optimizer = build_optimizer(OptimizationConfig(), num_steps=20, num_warmup_steps=0)
        all_gradients = tf.function(gradients, jit_compile=config.bfloat16)()  # as a run with this policy always is
        names = [variable.name for variable in network.trainable_variables]
        # Attention does not depend on the keys' biases: theirs are 0, but for rounding.
        is_bias = [name.endswith("bias:0") and "/key/" not in name for name in names]
        return [gradient.numpy() for gradient, wanted in zip(all_gradients, is_bias, strict=True) if wanted]

    for gradient, expected in zip(bias_gradients(bfloat16=True), bias_gradients(), strict=True):
        assert np.linalg.norm(gradient - expected) < 0.05 * np.linalg.norm(expected)


def test_evaluation_counts_every_masked_token():
    model = build(one_cpu(), rule=MaskingRule(MASK, (0, 1, 2, 3, 4), VOCABULARY, mlm_probability=0.01))
    rows = build(one_cpu()).prepare_batch(batch_of(token_rows()), 0)
    sums = model.evaluation_step(rows)
    assert float(sums["num_masked"]) == rows.is_masked.numpy().sum()
    slots = model.task.evaluation_rule.num_prediction_slots(NUM_ROWS * LENGTH)
    assert float(tf.reduce_sum(collect_predictions(rows, slots).weights)) == float(sums["num_masked"])


@pytest.mark.usefixtures("eagerly")
def test_training_drops_out_by_the_keys_of_its_rows_and_evaluation_does_not():
    with one_cpu().scope():
        network = tiny_model("roberta", num_hidden_layers=1, hidden_dropout_prob=0.5)
        model = compiled_model(network, MaskedLanguageModeling(RULE, PAD))
    rows = model.prepare_batch(batch_of(token_rows()), 0)

    def loss(seed, num_micro_batches=1):
        model.num_micro_batches = num_micro_batches
        return float(model._gradients(rows, row_keys((seed,), NUM_ROWS))[1]["loss"])

    evaluated = {float(model.evaluation_step(rows)["loss"]) for _ in range(2)}
    assert len(evaluated) == 1
    assert len({loss(1), loss(2), *evaluated}) == 3
    assert loss(1, num_micro_batches=4) == pytest.approx(loss(1), rel=1e-5)


@pytest.mark.usefixtures("eagerly")
def test_means_over_steps_count_each_masked_token_once():
    """Steps have different numbers of masked tokens."""
    full = token_rows()
    batches = [full, np.where(np.arange(LENGTH) < 5, full, PAD)]
    model, losses, nums_masked = build(one_cpu()), [], []
    for rows in batches:
        prepared = model.prepare_batch(batch_of(rows), model.optimizer.iterations)
        nums_masked.append(int(tf.reduce_sum(tf.cast(prepared.is_masked, tf.int32))))
        model.reset_means()
        losses.append(train(model, rows, num_steps=1)["loss"])
    assert nums_masked[0] > 2 * nums_masked[1] > 0
    both = build(one_cpu())
    for rows in batches:
        figures = train(both, rows, num_steps=1)
    assert figures["loss"] == pytest.approx(np.average(losses, weights=nums_masked), rel=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-3  # else any mean would do
