"""Bad input to the trainer: one line that says how to fix it, exit status 2, before TensorFlow is imported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_common.tokenizer import save_tokenizer
from tests.fixtures.fresh_process import Answer, answers_of
from tests.fixtures.results import read_json
from tests.fixtures.tiny_corpus import train_tiny_tokenizer
from tests.fixtures.tiny_run import run_flags, write_shards


def segment_pairs(shards: Path) -> None:
    path = shards / "train" / "manifest.json"
    manifest = read_json(path) | {"chunking": "segment_pairs"}
    path.write_text(json.dumps(manifest), encoding="utf-8")


def another_tokenizer(shards: Path) -> None:
    tokenizer = train_tiny_tokenizer()
    tokenizer.add_tokens(["another"])
    save_tokenizer(tokenizer, str(shards / "another"))


def another_run(shards: Path) -> None:
    (shards / "run").mkdir()
    (shards / "run" / "run.json").write_text(json.dumps({"fingerprint": {"run.seed": 7}}), encoding="utf-8")


def model_folder(**config: Any) -> Callable[[Path], None]:
    def write(shards: Path) -> None:
        (shards / "model").mkdir(exist_ok=True)
        (shards / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")

    return write


def checkpoint(**config: Any) -> Callable[[Path], None]:
    """Write a RoBERTa with the tokenizer of the shards, but without weights."""

    def write(shards: Path) -> None:
        shutil.copytree(shards / "train" / "tokenizer", shards / "model")
        model_folder(**{"model_type": "roberta", "pad_token_id": 1, **config})(shards)

    return write


def checkpoint_of_another_vocabulary(shards: Path) -> None:
    another_tokenizer(shards)
    config = json.dumps({"model_type": "roberta", "vocab_size": 49})
    (shards / "another" / "config.json").write_text(config, encoding="utf-8")


OTHER_MODEL = "--pretrained-model-config {}/model --config-overrides num_hidden_layers=1"
ROFORMER = model_folder(model_type="roformer")
SHORT_BERT = model_folder(model_type="bert", max_position_embeddings=8)
# (flags in which {} is the shards' folder, what the error says, what is done to that folder before)
CASES: list[tuple[Any, ...]] = [
    ("--train-dataset {}/nowhere", "There is no folder {}/nowhere"),
    ("--train-dataset {}/train/manifest.json", "is a file, but rows are read from a folder of shards"),
    ("--tokenizer {}/another", "must be the one the shards were made", another_tokenizer),
    ("--max-length 32", "--max-length must be the shards' 16"),
    ("--schedule constant --min-learning-rate-ratio 0.1", "received 0.1 with constant"),
    # The model, the plan, the output folder, the device.
    ("--per-replica-batch-size 9999", "must not exceed the data set's"),
    ("--config-overrides num_hiden_layers=2", "num_hiden_layers"),
    ("--init-from {}/nowhere", "--init-from: there is no folder"),
    ("--init-from {}/another", "--init-from must have the vocabulary that", checkpoint_of_another_vocabulary),
    ("--init-from {}/model", "an embedding for each of the tokenizer's 48 ids", checkpoint(vocab_size=47)),
    ("--init-from {}/model", "has pad_token_id 2", checkpoint(vocab_size=48, pad_token_id=2)),
    ("--init-from {}/model", "must hold model.safetensors or tf_model.h5", checkpoint(vocab_size=48)),
    (OTHER_MODEL, "the model takes at most 8. Give --config-overrides max_position_embeddings=16", SHORT_BERT),
    (f"{OTHER_MODEL} --block-attention", "xlm-roberta; the model is a roformer. Leave the flag out", ROFORMER),
    ("--block-attention", "a [SEP] ends each document (--chunking concat, full_sentences", segment_pairs),
    ("--dropout 0 --config-overrides hidden_dropout_prob=0.1", "--config-overrides hidden_dropout_prob must not both"),
    ("--output-dir {}/run --resume never", "With --resume never, --output-dir must not contain a run", another_run),
    ("--output-dir /dev/null/run", "must be writable; /dev/null/run is"),
    ("--tpu-name local", "this one has no /dev/accel*"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[tuple[Path, Answer]]:
    source = write_shards(tmp_path_factory.mktemp("source"))
    folders, commands = [], []
    for flags, _, *changes in CASES:
        shards = tmp_path_factory.mktemp("case") / "shards"
        shutil.copytree(source, shards)
        for change in changes:
            change(shards)
        folders.append(shards)
        words = flags.replace("{}", str(shards)).split()
        commands.append(("train.run_mlm", run_flags(shards, shards / "output", *words)))
    return list(zip(folders, answers_of(commands), strict=True))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{flags} {said}" for flags, said, *_ in CASES])
def test_bad_input_is_one_line_with_a_fix(answers, index):
    shards, answer = answers[index]
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert CASES[index][1].replace("{}", str(shards)) in line
    assert "Traceback" not in answer.err
    assert (answer.status, answer.has_tensorflow) == (2, False)
