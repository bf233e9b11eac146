"""Commands on models and runs of which a file is damaged: success, or one line that says what is wrong."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mlm_common.errors import EXIT_BAD_INPUT, InputError
from tests.fixtures.damage import LFS_POINTER, copied, damage
from tests.fixtures.results import read_json
from tests.fixtures.tiny_run import run_flags
from train.checks.machine import findings_of
from train.compare_runs import main as compare
from train.config.settings import parse_run_flags
from train.doctor import check_folder
from train.export import main as export
from train.fill_mask import main as fill_mask
from train.model.pretrained_files import read_config
from train.run_mlm import main

OF_AN_EXPORT = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
OF_A_RUN = ("run.json", "metrics.jsonl", "checkpoints/step-00000006.json", "checkpoints/step-00000006.safetensors")


def assert_ends_well(outcome):
    """A command has succeeded, or ends with one line; an exception would have come out of it."""
    lines = outcome.err.splitlines()
    if outcome.status != 0:
        assert outcome.status in (1, EXIT_BAD_INPUT, 3)
        assert lines[-1].startswith("error: ")
        assert len(lines[-1]) < 1500
    assert sum(line.startswith("error: ") for line in lines) == (outcome.status != 0)
    assert "Traceback" not in outcome.err


def in_a_model(shards, folder, tmp_path):
    """The commands that open a model, with what each needs to get as far as its weights."""
    start = run_flags(shards, tmp_path / "new", "--init-from", str(folder), "--dry-run")
    return (
        (fill_mask, ["--model", str(folder), "--text", "a [MASK]"]),
        (export, [str(folder), str(tmp_path / "exported"), "--overwrite"]),
        (main, start),
    )


@pytest.mark.usefixtures("eagerly")
@settings(max_examples=20)
@given(data=st.data())
def test_a_model_with_any_damaged_file_is_used_or_refused_in_one_line(data, finished_run, shards, run, tmp_path):
    model = copied(finished_run / "export", tmp_path / "model")
    note(damage(model, OF_AN_EXPORT, data.draw))
    command, flags = data.draw(st.sampled_from(in_a_model(shards, model, tmp_path)), label="command")
    assert_ends_well(run(command, *flags))


@pytest.mark.usefixtures("eagerly")
@settings(max_examples=20)
@given(data=st.data())
def test_a_run_with_any_damaged_file_is_read_or_refused_in_one_line(data, finished_run, shards, run, tmp_path):
    folder = copied(finished_run, tmp_path / "run")
    note(damage(folder, OF_A_RUN, data.draw))
    commands = (
        (compare, ["--runs", str(folder)]),
        (export, [str(folder), str(tmp_path / "exported"), "--overwrite"]),
        (fill_mask, ["--model", str(folder), "--text", "a [MASK]"]),
        (main, run_flags(shards, folder, "--dry-run")),
        (main, run_flags(shards, folder, "--dry-run", "--overwrite-output-dir")),
    )
    command, flags = data.draw(st.sampled_from(commands), label="command")
    assert_ends_well(run(command, *flags))
    config = parse_run_flags(["--output-dir", str(folder)], "")[0]
    assert not any("could not be checked" in str(finding) for finding in findings_of("run", check_folder, config))


REFUSALS = {
    "empty": (b"", "must be a whole safetensors file; it is empty"),
    "pointer": (LFS_POINTER, r"it is a Git LFS pointer\. Fetch the file itself with `git lfs pull`"),
    "other": (b"x" * 100, "must be a whole safetensors file; Error while deserializing header"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_a_weights_file_is_instead(kind, finished_run, shards, run, tmp_path):
    model = copied(finished_run / "export", tmp_path / "model")
    content, reason = REFUSALS[kind]
    (model / "model.safetensors").write_bytes(content)
    for command, flags in in_a_model(shards, model, tmp_path):
        assert_refuses(run(command, *flags), reason.replace("\\", ""), "model.safetensors")


def assert_refuses(outcome, *texts):
    for text in texts:
        assert text in outcome.refusal


def test_a_weights_file_that_may_not_be_read(finished_run, run, tmp_path, monkeypatch):
    """The library of safetensors says then that there is no such file."""
    model = copied(finished_run / "export", tmp_path / "model")
    path = model / "model.safetensors"
    opened = Path.open

    def refuse(self, *args, **options):
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(self, *args, **options)

    def not_found(*_, **__):
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("train.model.pretrained_files.safe_open", not_found)
    refusal = run(fill_mask, "--model", model, "--text", "a [MASK]").refusal
    assert f"{path} must be a whole safetensors file; permission denied. Check the path and its permissions." in refusal


def test_indexes_of_shards(finished_run, run, tmp_path):
    model = copied(finished_run / "export", tmp_path / "model")
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
    model = copied(finished_run / "export", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = next(one for one in sorted(weights) if one.endswith("query.weight"))
    save_file(weights | {name: np.full_like(weights[name], np.nan)}, model / "model.safetensors")
    refusal = run(fill_mask, "--model", model, "--text", "a [MASK]").refusal
    assert "has NaN or infinity, as after a training that diverged" in refusal


def test_a_configuration_without_architectures_is_taken_at_the_word_of_its_weights(finished_run, run, tmp_path):
    """As Google's small BERTs are published."""
    model = copied(finished_run / "export", tmp_path / "model")
    config = read_json(model / "config.json")
    del config["architectures"]
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    flags = ("--model", model, "--text", "a [MASK]")
    assert run(fill_mask, *flags).out == run(fill_mask, "--model", finished_run, "--text", "a [MASK]").out
    weights = {name: one for name, one in load_file(model / "model.safetensors").items() if "lm_head" not in name}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "The weights must be those of a RobertaForMaskedLM" in run(fill_mask, *flags).refusal


def test_a_folder_that_has_a_run_in_it(finished_run, run, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "model").symlink_to(finished_run)
    refusal = run(export, tmp_path / "work", tmp_path / "exported").refusal
    assert f"Did you mean {tmp_path / 'work' / 'model'}?" in refusal


def test_records_of_a_run_that_are_damaged(finished_run, shards, run, tmp_path):
    folder = copied(finished_run, tmp_path / "run")
    record, log = (folder / "run.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    (folder / "run.json").write_bytes(b'{"a"\n')
    damaged = f"{folder / 'run.json'} must be the record of a run; Expecting ':' delimiter: line 2 column 1 (char 5)."
    for command, flags in (
        (export, (folder, tmp_path / "exported")),
        (compare, ("--runs", folder)),
        (main, run_flags(shards, folder)),
        (main, run_flags(shards, folder, "--dry-run")),
    ):
        assert f"{damaged} Restore it from a backup" in run(command, *flags).refusal
    (folder / "run.json").write_bytes(record)
    (folder / "metrics.jsonl").write_bytes(log[:50])
    assert "metrics.jsonl has no complete line yet. Try again later." in run(compare, "--runs", folder).refusal
    (folder / "metrics.jsonl").write_bytes(b"\xff\n" + log)
    assert "metrics.jsonl has no complete line yet" in run(compare, "--runs", folder).refusal
    (folder / "metrics.jsonl").write_bytes(log + b'{"step": 7, "split": "train", "loss": "1.0"}\n')
    assert run(compare, "--runs", folder).status == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hidden_size", "64"), ("vocab_size", None), ("num_hidden_layers", []), ("intermediate_size", -1)),
        *(("num_attention_heads", 2.5), ("max_position_embeddings", 10**30), ("layer_norm_eps", "1e-5")),
    ],
)
def test_numbers_of_a_configuration_are_numbers(name, value, finished_run, tmp_path):
    config = read_json(finished_run / "export" / "config.json") | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=rf"config.json must be the configuration of a model; its {name} must be a"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pad_token_id", {}),
        ("eos_token_id", "a"),
        ("use_cache", ""),
        ("output_attentions", []),
        ("id2label", {"1": []}),
    ],
)
def test_other_settings_of_a_configuration_have_their_types(name, value, finished_run, tmp_path):
    """transformers takes them as they are, and TensorFlow would fail with the first row."""
    config = read_json(finished_run / "export" / "config.json") | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=rf"config.json must be the configuration of a model; its {name} must "):
        read_config(str(tmp_path))
