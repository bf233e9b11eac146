"""Lower one of the train steps that train_step_tpu.py compares to StableHLO.

    python benchmarks/peers/tpu_step_contenders.py tutorial-bf16 --rows 16 --output step.mlir

The tutorial's step is the step in transformers' examples/tensorflow/language-modeling-tpu/run_mlm.py: `compile` and
`fit` of the TF class with the optimizer of `create_optimizer`, the loss inside the model, and logits at every position.
The input pipeline makes the masks, so they are not part of the step. Our steps are the steps that run_mlm.py runs with
the flags given below.
"""

import argparse
import sys
from pathlib import Path

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401  (before TensorFlow)

TUTORIAL = {"tutorial-float32": "float32", "tutorial-bf16": "mixed_bfloat16"}
ON_TPU = ("--tpu-name", "local", "--bfloat16")  # so the model uses the TPU-optimized layers
BASE = ("--preset", "roberta-base", *ON_TPU)
TPU_SHAPED = ("--preset", "roberta-base-tpu-shaped", *ON_TPU)
# Flags of run_mlm.py. The benchmark sets batch size and accumulation.
OURS = {
    "ours": (*BASE, "--dropout", "0.1"),
    "ours-no-dropout": (*BASE, "--dropout", "0"),
    "ours-tpu-shaped": (*TPU_SHAPED, "--dropout", "0.1"),
    "ours-tpu-shaped-no-dropout": (*TPU_SHAPED, "--dropout", "0"),
    # This step has the same number of predictions as the other steps.
    "modernbert": ("--preset", "modernbert-base", *ON_TPU, "--mlm-probability", "0.15"),
    "modernbert-tpu-shaped": ("--preset", "modernbert-base-tpu-shaped", *ON_TPU, "--mlm-probability", "0.15"),
}
CONTENDERS = (*TUTORIAL, *OURS)


def lower_tutorial(policy: str, sizes: argparse.Namespace) -> str:
    """Lower the tutorial's step for RoBERTa-base to StableHLO, with its dropout of 0.1."""
    import tensorflow as tf
    import tf_keras
    from transformers import RobertaConfig, TFAutoModelForMaskedLM, create_optimizer

    from train.runtime.lowering import lower

    tf_keras.mixed_precision.set_global_policy(policy)
    config = RobertaConfig(
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.length + 2,
        type_vocab_size=1,
        **({"num_hidden_layers": sizes.num_layers} if sizes.num_layers else {}),
    )
    model = TFAutoModelForMaskedLM.from_config(config)
    model(model.dummy_inputs)
    optimizer, _ = create_optimizer(
        num_train_steps=100_000, num_warmup_steps=5_000, init_lr=1e-4, weight_decay_rate=0.001
    )
    model.compile(optimizer=optimizer, metrics=["accuracy"])
    optimizer._create_all_weights(model.trainable_variables)  # `fit` creates them before the step is traced

    spec = tf.TensorSpec((sizes.rows, sizes.length), tf.int32)
    batch = dict.fromkeys(("input_ids", "attention_mask", "labels"), spec)
    return lower(model.train_step, (batch,), sizes.num_replicas).stablehlo


def lower_ours(flags: tuple[str, ...], sizes: argparse.Namespace) -> str:
    """Lower the step that run_mlm.py runs with these flags to StableHLO."""
    import tensorflow as tf

    from train.checks.preflight.preflight import lower_train_step
    from train.checks.preflight.report import open_run
    from train.config.settings import parse_run_flags
    from train.runtime.tensorflow_runtime import TensorFlowRuntime
    from train.step.train_step import build_model

    layers = ("--config-overrides", f"num_hidden_layers={sizes.num_layers}") if sizes.num_layers else ()
    batch = ("--per-replica-batch-size", str(sizes.rows), "--gradient-accumulation-steps", "1")
    config, _ = parse_run_flags([*flags, *layers, *batch, "--max-length", str(sizes.length)], "")
    run = open_run(config, sizes.vocab_size, sizes.num_replicas)
    (phase,), (plan,) = run.phases, run.plans
    runtime = TensorFlowRuntime(tf.distribute.get_strategy())
    model = build_model(config, phase.inputs, phase.task, phase.model_config, plan, runtime)
    return lower_train_step(model, num_rows=sizes.rows, length=sizes.length, num_replicas=sizes.num_replicas)


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the size of a step."""
    parser.add_argument("--length", type=int, default=512, help="Tokens per row.")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--num-layers", type=int, help="Fewer layers, to try out the benchmark.")


def main() -> None:
    """Write the step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--rows", type=int, default=16, help="Rows per replica.")
    parser.add_argument("--num-replicas", type=int, default=8)
    parser.add_argument("--output", required=True, help="File to write.")
    add_size_flags(parser)
    arguments = parser.parse_args()

    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # a step that is lowered on a GPU contains operations for GPUs
    if arguments.contender in TUTORIAL:
        text = lower_tutorial(TUTORIAL[arguments.contender], arguments)
    else:
        text = lower_ours(OURS[arguments.contender], arguments)
    Path(arguments.output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
