"""The TensorFlow programs that benchmarks/train_step_cpu.py compares, which train on a folder of shards in rounds.

    python benchmarks/peers/train_step_contenders.py ours FOLDER --settings '{"length": 128, …}'

`tutorial` trains as transformers' TPU tutorial does, with its input (a shuffle buffer, records parsed one by one, masks
from the collator), the head over all positions, its optimizer, `compile` and `fit`. `ours` is `run_mlm.py`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401, I001  (before TensorFlow)
import tf_keras

from benchmarks.peers.input_contenders import CLS_ID, MASK_ID, PAD_ID, SEP_ID, tutorial_batches
from benchmarks.measuring.rounds import Rounds
from tfrecord_prep.manifest import open_shards
from train.config.settings import parse_training_config
from train.loop.fitting import fit
from train.loop.lifecycle import Pretraining, prepare
from train.loop.run import Run
from train.runtime.runtime_choice import connect
from train.loop.trainer import Trainer

NUM_STEPS = 100_000


class RoundsCallback(tf_keras.callbacks.Callback):
    """Counts the steps of `fit`."""

    _supports_tf_logs = True  # otherwise Keras would read the logs of each step from the device

    def __init__(self, rounds: Rounds):
        super().__init__()
        self.rounds = rounds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.rounds.step_done()


def tutorial(folder: str, settings: dict[str, Any], rounds: Rounds, _: list[str]) -> None:
    """Train as the tutorial's run_mlm.py does with its default flags."""
    from transformers import RobertaConfig, TFAutoModelForMaskedLM, create_optimizer

    model = TFAutoModelForMaskedLM.from_config(
        RobertaConfig(
            **settings["model"], pad_token_id=PAD_ID, bos_token_id=CLS_ID, eos_token_id=SEP_ID, mask_token_id=MASK_ID
        )
    )
    optimizer, _ = create_optimizer(
        num_train_steps=NUM_STEPS, num_warmup_steps=NUM_STEPS // 20, init_lr=1e-4, weight_decay_rate=1e-3
    )
    model.compile(optimizer=optimizer, metrics=["accuracy"])
    batches = tutorial_batches(
        open_shards(folder), settings["length"], settings["batch_rows"], settings["model"]["vocab_size"]
    )
    model.fit(batches.repeat(), steps_per_epoch=NUM_STEPS, epochs=1, verbose=0, callbacks=[RoundsCallback(rounds)])


def ours(folder: str, settings: dict[str, Any], rounds: Rounds, flags: list[str]) -> None:
    """Train as run_mlm.py does, with its log, and without validation."""

    overrides = {name: value for name, value in settings["model"].items() if name != "vocab_size"}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        config = parse_training_config(
            [
                *("--train-dataset", folder, "--tokenizer", f"{folder}/tokenizer", "--output-dir", f"{output_dir}/run"),
                *("--preset", "roberta-base", "--max-steps", str(NUM_STEPS)),
                *("--config-overrides", ",".join(f"{name}={value}" for name, value in overrides.items())),
                *("--per-replica-batch-size", str(settings["batch_rows"]), *flags),
            ],
            "",
        )
        fit_in_rounds(our_trainer(prepare(config, Pretraining())), rounds)


def our_trainer(run: Run) -> Trainer:
    """Build the trainer of a run."""
    runtime = connect(run.config.hardware, run.cluster)
    return Trainer(run.planned(runtime.num_replicas), 0, runtime)


def fit_in_rounds(trainer: Trainer, rounds: Rounds) -> None:
    """Train with an additional callback that counts the steps."""
    model_fit = trainer.model.fit

    def fit_with_callback(*args: Any, callbacks: list[Any], **options: Any) -> Any:
        return model_fit(*args, callbacks=[*callbacks, RoundsCallback(rounds)], **options)

    trainer.model.fit = fit_with_callback
    fit(trainer)


CONTENDERS = {"tutorial": tutorial, "ours": ours}


def main() -> None:
    """Train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("folder", help="Folder with shards and tokenizer/.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: model, length, batch_rows, rounds.")
    arguments, flags = parser.parse_known_args()
    CONTENDERS[arguments.contender](arguments.folder, arguments.settings, Rounds(**arguments.settings["rounds"]), flags)


if __name__ == "__main__":
    main()
