"""Commands on models and runs of which a file is damaged, beside `tests/commands/test_ugly_files.py`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlm_common.errors import InputError
from tests.fixtures.results import read_json
from tests.fixtures.tiny_run import run_flags
from train.compare_runs import main as compare
from train.export import main as export
from train.fill_mask import main as fill_mask
from train.model.pretrained_files import read_config
from train.run_mlm import main

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 134\n"


def test_indexes_of_shards(finished_run, run, tmp_path):
    model = Path(shutil.copytree(finished_run / "export", tmp_path / "model"))
    shutil.move(model / "model.safetensors", model / "part.safetensors")
    index = model / "model.safetensors.index.json"
    names = sorted(load_file(model / "part.safetensors"))
    flags = ("--model", model, "--text", "a [MASK]")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}), encoding="utf-8")
    assert run(fill_mask, *flags).status == 0
    for content, reason in (
        ({"metadata": {}}, "must be an index of safetensors files; it has no 'weight_map'"),
        ([], "must be an index of safetensors files"),
        ({"weight_map": {names[0]: 1}}, "must be an index of safetensors files"),
        ({"weight_map": {}}, "its weight_map must name files in the same folder"),
        ({"weight_map": {names[0]: "../part.safetensors"}}, "its weight_map must name files in the same folder"),
        ({"weight_map": {names[0]: "lost.safetensors"}}, "lacks lost.safetensors, which its model.safetensors.index"),
    ):
        index.write_text(json.dumps(content), encoding="utf-8")
        assert reason in run(fill_mask, *flags).refusal
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}), encoding="utf-8")
    (model / "part.safetensors").write_bytes(LFS_POINTER)
    assert (
        "part.safetensors must be a whole safetensors file; it is a Git LFS pointer" in run(fill_mask, *flags).refusal
    )


def test_weights_that_are_not_finite(finished_run, run, tmp_path):
    model = Path(shutil.copytree(finished_run / "export", tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    name = next(key for key in sorted(weights) if key.endswith("query.weight"))
    save_file(weights | {name: np.full_like(weights[name], np.nan)}, model / "model.safetensors")
    refusal = run(fill_mask, "--model", model, "--text", "a [MASK]").refusal
    assert "has NaN or infinity, as after a training that diverged" in refusal


def test_a_configuration_without_architectures_is_taken_at_the_word_of_its_weights(finished_run, run, tmp_path):
    """As Google's small BERTs are published."""
    model = Path(shutil.copytree(finished_run / "export", tmp_path / "model"))
    config = read_json(model / "config.json")
    del config["architectures"]
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    flags = ("--model", model, "--text", "a [MASK]")
    assert run(fill_mask, *flags).out == run(fill_mask, "--model", finished_run, "--text", "a [MASK]").out
    weights = {name: array for name, array in load_file(model / "model.safetensors").items() if "lm_head" not in name}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "The weights must be those of a RobertaForMaskedLM" in run(fill_mask, *flags).refusal


REFUSALS = {
    "empty": (b"", "must be a whole safetensors file; it is empty"),
    "pointer": (LFS_POINTER, "it is a Git LFS pointer. Fetch the file itself with `git lfs pull`"),
    "other": (b"x" * 100, "must be a whole safetensors file; Error while deserializing header"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_a_weights_file_is_instead(kind, finished_run, shards, run, tmp_path):
    model = Path(shutil.copytree(finished_run / "export", tmp_path / "model"))
    content, reason = REFUSALS[kind]
    (model / "model.safetensors").write_bytes(content)
    for command, flags in (
        (fill_mask, ["--model", model, "--text", "a [MASK]"]),
        (export, [model, tmp_path / "exported", "--overwrite"]),
        (main, run_flags(shards, tmp_path / "new", "--init-from", str(model), "--dry-run")),
    ):
        refusal = run(command, *flags).refusal
        assert reason in refusal
        assert "model.safetensors" in refusal


def test_records_of_a_run_that_are_damaged(finished_run, shards, run, tmp_path):
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    record, log = (folder / "run.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    (folder / "run.json").write_bytes(b'{"a"\n')
    for command, flags in (
        (export, (folder, tmp_path / "exported")),
        (compare, ("--runs", folder)),
        (main, run_flags(shards, folder)),
        (main, run_flags(shards, folder, "--dry-run")),
    ):
        refusal = run(command, *flags).refusal
        assert f"{folder / 'run.json'} must be the record of a run; Expecting ':' delimiter: line 2" in refusal
    (folder / "run.json").write_bytes(record)
    for content in (log[:50], b"\xff\n" + log):
        (folder / "metrics.jsonl").write_bytes(content)
        assert "metrics.jsonl has no complete line yet" in run(compare, "--runs", folder).refusal
    (folder / "metrics.jsonl").write_bytes(log + b'{"step": 7, "split": "train", "loss": "1.0"}\n')
    assert run(compare, "--runs", folder).status == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hidden_size", "64"), ("num_hidden_layers", []), ("intermediate_size", -1), ("layer_norm_eps", "1e-5")),
        *(("max_position_embeddings", 10**30), ("pad_token_id", {}), ("use_cache", ""), ("id2label", {"1": []})),
    ],
)
def test_settings_of_a_configuration_have_their_types(name, value, finished_run, tmp_path):
    """transformers takes them as they are, and TensorFlow would fail with the first row."""
    config = read_json(finished_run / "export" / "config.json") | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=rf"config.json must be the configuration of a model; its {name} must "):
        read_config(str(tmp_path))
