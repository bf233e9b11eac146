"""Bad input to the trainer: one line that says how to fix it, exit status 2, before TensorFlow is imported."""

import json
import shutil
from pathlib import Path

import pytest

from mlm_common.tokenizer import save_tokenizer
from tests.fixtures.fresh_process import Answer, answers_of
from tests.fixtures.tiny_corpus import train_tiny_tokenizer
from tests.fixtures.tiny_run import run_flags, write_shards


def edit_manifest(shards: Path, change) -> None:
    path = shards / "train" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def first_shard(shards: Path) -> Path:
    return sorted((shards / "train").glob("*.tfrecord"))[0]


def another_tokenizer(shards: Path) -> None:
    tokenizer = train_tiny_tokenizer()
    tokenizer.add_tokens(["another"])
    save_tokenizer(tokenizer, str(shards / "another"))


def another_run(shards: Path) -> None:
    (shards / "run").mkdir()
    (shards / "run" / "run.json").write_text(json.dumps({"fingerprint": {"run.seed": 7}}), encoding="utf-8")


def model_folder(**config):
    def write(shards: Path) -> None:
        (shards / "model").mkdir()
        (shards / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")

    return write


def checkpoint(**config):
    """Write a RoBERTa with the tokenizer of the shards, but without weights."""

    def write(shards: Path) -> None:
        shutil.copytree(shards / "train" / "tokenizer", shards / "model")
        settings = {"model_type": "roberta", "pad_token_id": 1, **config}
        (shards / "model" / "config.json").write_text(json.dumps(settings), encoding="utf-8")

    return write


def checkpoint_of_another_vocabulary(shards: Path) -> None:
    another_tokenizer(shards)
    (shards / "another" / "config.json").write_text(
        json.dumps({"model_type": "roberta", "vocab_size": 49}), encoding="utf-8"
    )


def truncate(shards: Path) -> None:
    shard = first_shard(shards)
    shard.write_bytes(shard.read_bytes()[:-1])


# name: (what is done to the shards' folder, flags in which {} is that folder, what the error says)
CASES = {
    "no shards": (lambda _: None, ["--train-dataset", "{}/nowhere"], "There is no folder"),
    "killed preparation": (
        lambda shards: (shards / "train" / "manifest.json").unlink(), [], "Run prepare_tfrecord_shards.py again",
    ),
    "shard missing": (lambda shards: first_shard(shards).unlink(), [], "tfrecord: no such file, in the manifest"),
    "shard truncated": (truncate, [], "bytes, in the manifest"),
    "another tokenizer": (another_tokenizer, ["--tokenizer", "{}/another"], "must be the one the shards were made"),
    "no tokenizer": (lambda _: None, ["--tokenizer", "{}/nowhere"], "There is no folder"),
    "another length": (lambda _: None, ["--max-length", "32"], "--max-length must be the shards' 16"),
    "mask rates": (lambda _: None, ["--random-token-rate", "0.3"], "must sum to at most 1"),
    "unknown preset": (lambda _: None, ["--preset", "huge"], "--preset: there is no preset huge; "),
    "dropout": (lambda _: None, ["--dropout", "1"], "--dropout must be at least 0 and below 1; received 1.0"),
    "two ways to start": (
        lambda _: None, ["--resume", "must", "--overwrite-output-dir"], "cannot be combined with --resume must",
    ),
    "settings file": (lambda _: None, ["--config-file", "{}/nowhere.yaml"], "--config-file: there is no file "),
    "a schedule without an end": (
        lambda _: None, ["--schedule", "constant", "--min-learning-rate-ratio", "0.1"], "received 0.1 with constant",
    ),
    "profile": (lambda _: None, ["--profile", "5:5"], "--profile must be START:STOP"),
    "no training shards": (lambda _: None, ["--train-dataset", ""], "--train-dataset is required"),
    # The model, the plan, the output folder, the device.
    "batch too large": (lambda _: None, ["--per-replica-batch-size", "9999"], "must not exceed the data set's"),
    "unknown override": (lambda _: None, ["--config-overrides", "num_hiden_layers=2"], "num_hiden_layers"),
    "malformed override": (lambda _: None, ["--config-overrides", "hidden_size"], "must be name=value"),
    "override of the data": (lambda _: None, ["--config-overrides", "vocab_size=5"], "must not set vocab_size"),
    "no such model": (
        lambda _: None, ["--pretrained-model-config", "{}/nowhere"], "--pretrained-model-config: there is no folder",
    ),
    "no such checkpoint": (lambda _: None, ["--init-from", "{}/nowhere"], "--init-from: there is no folder"),
    "two configurations": (
        lambda _: None,
        ["--init-from", "{}/model", "--pretrained-model-config", "bert-base-uncased"],
        "--init-from brings its own configuration; received --pretrained-model-config bert-base-uncased as well",
    ),
    "another vocabulary": (
        checkpoint_of_another_vocabulary,
        ["--init-from", "{}/another"],
        "--init-from must have the vocabulary that the shards were made with",
    ),
    "a checkpoint of fewer ids": (
        checkpoint(vocab_size=47), ["--init-from", "{}/model"], "an embedding for each of the tokenizer's 48 ids",
    ),
    "a checkpoint that pads otherwise": (
        checkpoint(vocab_size=48, pad_token_id=2), ["--init-from", "{}/model"], "has pad_token_id 2",
    ),
    "a checkpoint without weights": (
        checkpoint(vocab_size=48), ["--init-from", "{}/model"], "must hold model.safetensors or tf_model.h5",
    ),
    "positions": (
        model_folder(model_type="bert", max_position_embeddings=8),
        ["--pretrained-model-config", "{}/model", "--config-overrides", "num_hidden_layers=1"],
        "the model takes 8. Give --config-overrides max_position_embeddings=16",
    ),
    "architecture": (
        model_folder(model_type="esm", vocab_size=5),
        ["--pretrained-model-config", "{}/model", "--config-overrides", "num_hidden_layers=1"],
        "received esm: its TF class",
    ),
    "documents of a model that sees them all": (
        model_folder(model_type="roformer"),
        ["--pretrained-model-config", "{}/model", "--config-overrides", "num_hidden_layers=1", "--block-attention"],
        "xlm-roberta; the model is a roformer. Leave the flag out, or give another --preset",
    ),
    "documents that cannot be told apart": (
        lambda shards: edit_manifest(shards, lambda manifest: manifest.update(chunking="segment_pairs")),
        ["--block-attention"],
        "a [SEP] ends each document: --chunking concat, full_sentences, documents, packed; that of ",
    ),
    "no learned positions": (
        model_folder(model_type="roformer"),
        ["--pretrained-model-config", "{}/model", "--config-overrides", "num_hidden_layers=1"],
        "a roformer as configured has none. Give --position-init random",
    ),
    "dropout twice": (
        lambda _: None,
        ["--dropout", "0", "--config-overrides", "hidden_dropout_prob=0.1"],
        "--dropout 0.0 and --config-overrides hidden_dropout_prob must not both be given",
    ),
    "heads of unequal size": (
        lambda _: None,
        ["--config-overrides", "num_attention_heads=5"],
        "must be a multiple of 5, num_attention_heads; received 192. Give --config-overrides hidden_size=195",
    ),
    "untied head": (
        lambda _: None, ["--config-overrides", "tie_word_embeddings=false"], "tie_word_embeddings of a roberta must be",
    ),
    "another run": (another_run, ["--output-dir", "{}/run"], "hardware.bfloat16: None there, False now"),
    "nothing to resume from": (lambda _: None, ["--resume", "must"], "--resume must needs a run with a checkpoint"),
    "a run where none must be": (
        another_run, ["--output-dir", "{}/run", "--resume", "never"], "--resume never needs a folder without a run",
    ),
    "a folder without a run to overwrite": (
        lambda _: None, ["--output-dir", "{}/train", "--overwrite-output-dir"], "and no run.json of a run.",
    ),
    "a folder that cannot be written": (
        lambda _: None, ["--output-dir", "/dev/null/run"], "must be writable; /dev/null/run is",
    ),
    "foreign folder": (lambda _: None, ["--output-dir", "{}/train"], "must be an empty folder or that of this run"),
    "no TPU": (lambda _: None, ["--tpu-name", "local"], "this one has no /dev/accel*"),
    "warmup": (lambda _: None, ["--warmup-steps", "6"], "must be below the run's 6 steps"),
    "no room for the decay": (
        lambda _: None, ["--schedule", "wsd", "--warmup-ratio", ".5", "--decay-ratio", ".7"], "received 3 and 4 steps",
    ),
    "profile after the end": (lambda _: None, ["--profile", "5:7"], "--profile must end within the run's 6 steps"),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    source = write_shards(tmp_path_factory.mktemp("source"))
    commands = []
    for name, (prepare, more, _) in CASES.items():
        shards = tmp_path_factory.mktemp("case") / name.replace(" ", "-")
        shutil.copytree(source, shards)
        prepare(shards)
        flags = run_flags(shards, shards / "output", *(flag.format(shards) for flag in more))
        commands.append(("train.run_mlm", flags))
    return dict(zip(CASES, answers_of(commands), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_with_a_fix(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert CASES[name][2] in line
    assert "Traceback" not in answer.err
    assert (answer.status, answer.has_tensorflow) == (2, False)
