"""The recipes that time_to_quality.py and recipes.py compare. They train on shards in rounds, and evaluate after each.

    python benchmarks/peers/quality_contenders.py ours SHARDS --settings '{"num_steps": 1000, …}'

`tutorial` is the recipe of transformers' TPU tutorial: its input, head, optimizer and default flags, with the sizes of
the preset's model. `tutorial-tuned` also uses the preset's model configuration, batch size and peak learning rate. Both
tutorial recipes need the extra `legacy`. `ours` is `run_mlm.py --preset`.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401, I001  (before TensorFlow)
from transformers import PretrainedConfig

from benchmarks.peers.input_contenders import tutorial_batches
from benchmarks.measuring.rounds import Rounds
from benchmarks.peers.train_step_contenders import RoundsCallback, fit_in_rounds, our_trainer
from train.config.settings import TrainingConfig
from train.config.settings import parse_training_config
from train.data.shards import TrainingInputs
from train.model.legacy import gather_before_head
from train.loop.lifecycle import Pretraining, prepare
from train.loop.run import Run
from train.runtime.preemption import StopRequest
from train.loop.trainer import Trainer

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "type_vocab_size",
)  # fmt: skip
# Defaults of the tutorial's run_mlm.py.
TUTORIAL_BATCH_ROWS, TUTORIAL_LEARNING_RATE, TUTORIAL_WEIGHT_DECAY = 8, 1e-4, 1e-3
TUTORIAL_STEPS_PER_WARMUP_STEP = 20


def our_config(shards: str, preset: str, num_steps: int, output_dir: str, *flags: str) -> TrainingConfig:
    """Make the settings of `run_mlm.py` for a folder with train/ and validation/, and additional flags."""
    datasets = ["--train-dataset", f"{shards}/train", "--eval-dataset", f"{shards}/validation"]
    run = ["--preset", preset, "--max-steps", str(num_steps), "--output-dir", f"{output_dir}/run"]
    return parse_training_config([*datasets, *run, *flags], "")


def rounds_of(trainer: Trainer, settings: dict[str, Any], evaluator: Trainer | None = None) -> Rounds:
    """Make rounds that, if the settings request it, end with an evaluation of the trainer's model.

    Args:
        evaluator: a trainer that evaluates the model with different settings; default: `trainer`.
    """
    if evaluator:
        evaluator.model.network = trainer.model.network

    def figures() -> dict[str, float]:
        evaluation = (evaluator or trainer).evaluate(StopRequest()) if settings["evaluates"] else None
        return {"loss": evaluation["loss"]} if evaluation else {}

    return Rounds(settings["steps_per_round"], warmup_steps=1, figures=figures)


def ours(run: Run, settings: dict[str, Any], evaluating_run: Run | None = None) -> None:
    """Train as run_mlm.py does."""
    trainer = our_trainer(run)
    fitted = copy.copy(trainer)
    fitted.add_up = None
    runtime = trainer.model.runtime
    evaluator = Trainer(evaluating_run.planned(runtime.num_replicas), 0, runtime) if evaluating_run else None
    fit_in_rounds(fitted, rounds_of(trainer, settings, evaluator))


def tutorial(run: Run, settings: dict[str, Any], *, is_tuned: bool = False) -> None:
    """Train as the tutorial's run_mlm.py does."""
    from transformers import TFAutoModelForMaskedLM, create_optimizer  # of the extra `legacy`

    optimization, (phase,) = run.config.optimization, run.phases
    model = TFAutoModelForMaskedLM.from_config(phase.model_config if is_tuned else stock_config(phase.model_config))
    optimizer, _ = create_optimizer(
        num_train_steps=settings["num_steps"],
        num_warmup_steps=settings["num_steps"] // TUTORIAL_STEPS_PER_WARMUP_STEP,
        init_lr=optimization.learning_rate if is_tuned else TUTORIAL_LEARNING_RATE,
        weight_decay_rate=TUTORIAL_WEIGHT_DECAY,
    )
    model.compile(optimizer=optimizer, metrics=["accuracy"])
    batch_rows = optimization.per_replica_batch_size if is_tuned else TUTORIAL_BATCH_ROWS
    assert isinstance(phase.inputs, TrainingInputs)
    batches = tutorial_batches(phase.inputs.train_shards, phase.inputs.max_length, batch_rows, model.config.vocab_size)
    # Our evaluation is applied to the tutorial's model.
    trainer = our_trainer(run)
    gather_before_head(model)
    trainer.model.network = model
    callback = RoundsCallback(rounds_of(trainer, settings))
    model.fit(batches.repeat(), steps_per_epoch=settings["num_steps"], epochs=1, verbose=0, callbacks=[callback])


def stock_config(preset: PretrainedConfig) -> PretrainedConfig:
    """Make a configuration with the preset's sizes and ids, and transformers' defaults for everything else."""
    names = [*SIZES, *(name for name in preset.to_dict() if name.endswith("_token_id"))]
    return type(preset)(**{name: getattr(preset, name) for name in names})


Contender = Callable[[Run, dict[str, Any]], None]
CONTENDERS: dict[str, Contender] = {
    "tutorial": tutorial,
    "tutorial-tuned": partial(tutorial, is_tuned=True),
    "ours": ours,
}


def main() -> None:
    """Train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS, help="The tutorials need the extra `legacy`.")
    parser.add_argument("shards", help="Folder with train/ and validation/.")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="num_steps, steps_per_round, evaluates.")
    parser.add_argument("--flags", type=json.loads, default=[], help="Flags of run_mlm.py, for `ours`.")
    parser.add_argument(
        "--evaluation-flags", type=json.loads, default=[], help="Flags for evaluating `ours`, if different."
    )
    arguments = parser.parse_args()
    settings = arguments.settings
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:

        def run_of(*flags: str) -> Run:
            config = our_config(arguments.shards, arguments.preset, settings["num_steps"], output_dir, *flags)
            return prepare(config, Pretraining())

        run = run_of(*arguments.flags)
        if arguments.evaluation_flags:
            ours(run, settings, run_of(*arguments.flags, *arguments.evaluation_flags))
        CONTENDERS[arguments.contender](run, settings)


if __name__ == "__main__":
    main()
