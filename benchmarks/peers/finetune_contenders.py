"""The TensorFlow programs that benchmarks/finetune_step.py compares, which fine-tune a classifier in rounds.

    python benchmarks/peers/finetune_contenders.py ours FOLDER --settings '{"length": 128, …}'

`prepare` reads FOLDER/glue, and writes FOLDER/tokenizer, FOLDER/rows.npz, and FOLDER/start, a model with random
weights. `ours` is `run_classification.py`. `script` trains as transformers' examples/tensorflow/text-classification
does, with `prepare_tf_dataset`, `create_optimizer`, `compile` and `fit`. It pads all rows to the longest row of the
data, as a TPU requires, or with `--dynamic` to the longest row of the batch.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401, I001  (before TensorFlow)
import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.peers.train_step_contenders import RoundsCallback, fit_in_rounds, our_trainer
from benchmarks.measuring.rounds import Rounds
from finetuning.config.settings import ClassificationConfig
from finetuning.config.settings import ClassificationData
from finetuning.config.settings import parse_finetuning_config
from finetuning.data.buckets import training_batches
from finetuning.tasks.classification import read_splits
from finetuning.data.inputs import ExampleInputs
from finetuning.data.inputs import INPUT_IDS
from finetuning.data.inputs import encode_texts
from finetuning.tasks.classification import ClassificationJob
from mlm_common.tokenizer import load_tokenizer, special_ids, vocabulary_size
from tokenizer_training.train_unigram import main as train_unigram
from train.checkpoints.resume import ResumePoint
from train.loop import lifecycle
from train.loop.trainer import Trainer
from train.model.build import build_network
from train.publishing.pytorch_format import export_model

NUM_LABELS = 2
# Settings of transformers' script and of our command. WARMUP_RATIO is the fraction of the steps used for warmup.
LEARNING_RATE, NUM_EPOCHS, WARMUP_RATIO = 2e-5, 3, 0.1


def write_start(folder: Path, texts: Sequence[str], settings: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Write FOLDER/tokenizer, trained on the texts, and FOLDER/start, a RoBERTa with random weights."""
    from transformers import RobertaConfig

    (folder / "sentences.txt").write_text("\n".join(texts), encoding="utf-8")
    flags = ["--data-files", str(folder / "sentences.txt"), "--output-dir", str(folder / "tokenizer")]
    if train_unigram([*flags, "--vocab-size", str(settings["vocab_size"])]):
        sys.exit(1)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    ids, num_ids = special_ids(tokenizer), vocabulary_size(tokenizer)
    config = RobertaConfig(
        **settings["model"], vocab_size=num_ids, max_position_embeddings=settings["length"] + 2, type_vocab_size=1,
        pad_token_id=ids["pad"], bos_token_id=ids["cls"], eos_token_id=ids["sep"],
    )  # fmt: skip
    network = build_network(config, vocabulary_size=num_ids, seed=0)
    export_model(network, tokenizer, str(folder / "start"), model_max_length=settings["length"])
    return tokenizer


def prepare(folder: Path, settings: dict[str, Any]) -> None:
    """Write the files that all contenders start from."""
    parts = read_splits(ClassificationData(task_name="sst2", glue_dir=str(folder / "glue")))
    (sentences,) = parts.train.texts
    tokenizer = write_start(folder, sentences, settings)
    labels = np.array([name in ("1", "positive") for name in parts.train.labels or ()], np.int64)
    rows = encode_texts(tokenizer, parts.train.texts, max_length=settings["length"], token_types=False, labels=labels)
    np.savez(folder / "rows.npz", ids=rows.token_values[INPUT_IDS], starts=rows.starts, labels=labels)


def ours(folder: Path, settings: dict[str, Any], flags: list[str]) -> None:
    """Train as run_classification.py does, with its log, and without validation."""
    of_rows = ["--task-name", "sst2", "--glue-dir", str(folder / "glue")]
    train_in_rounds(ClassificationConfig, ClassificationJob(), folder, settings, [*of_rows, *flags], new_lengths)


def train_in_rounds(
    config_class: Any,
    job: lifecycle.Job,
    folder: Path,
    settings: dict[str, Any],
    flags: list[str],
    new_shapes: Callable[[Trainer], Sequence[int]],
) -> None:
    """Train as the command of a job does, with its log, and without validation.

    `new_shapes` returns the steps at which a new shape occurs. These steps are run first, so that nothing is compiled
    during a round.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        config = parse_finetuning_config(
            config_class,
            [
                *("--init-from", str(folder / "start"), "--output-dir", f"{output_dir}/run"),
                *("--max-seq-length", str(settings["length"]), "--num-epochs", str(NUM_EPOCHS)),
                *("--per-replica-batch-size", str(settings["batch_rows"]), *flags),
            ],
            "",
        )
        trainer = our_trainer(lifecycle.prepare(config, job))
        trainer.add_up = None
        trainer.load_initial_weights()
        started_seconds = time.perf_counter()
        train_function = trainer.model.make_train_function()
        steps = new_shapes(trainer)
        for step in steps:
            make_batches = trainer.batches_from(ResumePoint(int(step)))
            train_function(iter(trainer.runtime.distribute(make_batches)))
        figures = {"programs": float(len(steps)), "seconds to compile": time.perf_counter() - started_seconds}
        fit_in_rounds(trainer, Rounds(**settings["rounds"], figures=lambda: figures))


def new_lengths(trainer: Trainer) -> Sequence[int]:
    """Find the first step with each length of rows."""
    inputs, plan = trainer.phase.inputs, trainer.plan
    assert isinstance(inputs, ExampleInputs)
    batches = training_batches(
        inputs.train_rows.lengths,
        inputs.lengths,
        batch_rows=plan.global_batch_rows,
        seed=trainer.run.config.run.seed,
        first=0,
        num_batches=plan.num_steps,
    )
    return np.unique(batches.lengths, return_index=True)[1].tolist()


def script(folder: Path, settings: dict[str, Any], flags: list[str]) -> None:
    """Train as transformers' scripts for TensorFlow do."""
    from datasets import Dataset
    from transformers import AutoConfig, TFAutoModelForSequenceClassification, create_optimizer

    tokenizer = load_tokenizer(str(folder / "start"))
    rows, batch_rows = dict(np.load(folder / "rows.npz")), settings["batch_rows"]
    ids = np.split(rows["ids"], rows["starts"][1:-1])
    columns = {"input_ids": ids, "attention_mask": [np.ones_like(row) for row in ids]}
    if flags != ["--dynamic"]:
        columns = tokenizer.pad(columns, padding="longest", return_tensors="np")
    config = AutoConfig.from_pretrained(folder / "start", num_labels=NUM_LABELS)
    model = TFAutoModelForSequenceClassification.from_config(config)
    dataset = model.prepare_tf_dataset(
        Dataset.from_dict({**columns, "labels": rows["labels"]}), batch_rows, shuffle=True, tokenizer=tokenizer
    )
    num_steps = NUM_EPOCHS * len(dataset)
    optimizer, _ = create_optimizer(
        init_lr=LEARNING_RATE,
        num_train_steps=num_steps,
        num_warmup_steps=int(num_steps * WARMUP_RATIO),
        weight_decay_rate=0.01,
        adam_global_clipnorm=1.0,
    )
    model.compile(optimizer=optimizer, metrics=["accuracy"])
    model.fit(dataset, epochs=NUM_EPOCHS, verbose=0, callbacks=[RoundsCallback(Rounds(**settings["rounds"]))])


CONTENDERS = {"ours": ours, "script": script}


def main() -> None:
    """Write the files that the contenders start from, or train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=["prepare", *CONTENDERS])
    parser.add_argument("folder", type=Path, help="Folder with glue/.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: model, length, batch_rows, …")
    arguments, flags = parser.parse_known_args()
    if arguments.program == "prepare":
        prepare(arguments.folder, arguments.settings)
    else:
        CONTENDERS[arguments.program](arguments.folder, arguments.settings, flags)


if __name__ == "__main__":
    main()
