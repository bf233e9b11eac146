import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm_common.errors import InputError
from tests.fixtures.results import read_json
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_run import NUM_STEPS
from train.checkpoints.store import CheckpointStore
from train.export import _evaluate, best_checkpoint, main
from train.loop.lifecycle import Pretraining
from train.model.from_pretrained import load_model
from train.publishing.publisher import published_run
from train.publishing.saved_model import SavedModel, read_saved_model
from train.runtime.plan import PastPhase
from train.runtime.run_folder import RunFolder

REPO = "alice/exported"


@pytest.mark.parametrize("name", ["", f"checkpoints/step-{NUM_STEPS:08d}", f"checkpoints/step-{NUM_STEPS:08d}.json"])
def test_the_last_checkpoint_gives_the_export_of_the_run(name, finished_run, tmp_path):
    assert main([str(finished_run / name), str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(finished_run / "export")


def test_an_earlier_checkpoint_pushed_to_a_branch(finished_run, tmp_path, hub_here, run):
    """A model that was in the folder is replaced, and other files in it are not pushed."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}", encoding="utf-8")
    (out / ".env").write_text("a secret", encoding="utf-8")
    flags = [str(finished_run / "checkpoints" / "step-00000003"), str(out), "--push", REPO, "--private"]
    flags += ["--revision", "early"]
    assert "contains a model. Use another folder, or --overwrite" in run(main, *flags).refusal
    assert main([*flags, "--overwrite"]) == 0
    pushed = hub_here.files(REPO, revision="early")
    (out / ".env").unlink()
    assert pushed.keys() - {".gitattributes"} == contents(out).keys()
    assert contents(out).items() <= pushed.items()
    card = pushed["README.md"].decode()
    assert "step 3 of 6" in card
    assert f'model="{REPO}", revision="early"' in card
    assert "| 6 |" not in card
    assert pushed["model.safetensors"] != (finished_run / "export" / "model.safetensors").read_bytes()


def test_the_best_checkpoint(finished_run, tmp_path, run):
    shutil.copytree(finished_run, tmp_path / "run")
    store = CheckpointStore(RunFolder(str(tmp_path / "run")).checkpoints)
    record = store.read_record(3)
    store.write(dataclasses.replace(record, validation_loss=0.1, validation_score=None), store.read_arrays(record))
    assert main([str(tmp_path / "run"), str(tmp_path / "best"), "--best"]) == 0
    assert main([str(tmp_path / "run" / "checkpoints" / "step-00000003"), str(tmp_path / "third")]) == 0
    assert contents(tmp_path / "best") == contents(tmp_path / "third")
    newest = store.read_record(NUM_STEPS)
    later = dataclasses.replace(newest, plan=dataclasses.replace(newest.plan, before=(PastPhase(1, 1, 1),)))
    store.write(later, store.read_arrays(newest))
    assert best_checkpoint(str(tmp_path / "run")) == store.path(NUM_STEPS)
    assert "--best needs the OUTPUT_DIR" in run(main, tmp_path / "third", tmp_path / "out", "--best").refusal


def test_tensorflows_weights_too(finished_run, tmp_path):
    """And of a folder instead of a checkpoint."""
    assert main([str(finished_run / "export"), str(tmp_path / "out"), "--formats", "pytorch,tf"]) == 0
    folder = tmp_path / "out"
    assert (folder / "model.safetensors").read_bytes() == (finished_run / "export" / "model.safetensors").read_bytes()
    inputs = {"input_ids": np.arange(5, 17)[None]}
    pytest.importorskip("transformers.modeling_tf_utils")  # transformers 4
    from transformers import TFAutoModelForMaskedLM

    (folder / "model.safetensors").unlink()
    tensorflow = TFAutoModelForMaskedLM.from_pretrained(folder)
    ours = load_model(str(finished_run / "export"))
    np.testing.assert_allclose(tensorflow(inputs).logits, ours(inputs).logits, atol=1e-6)


def test_what_cannot_be_exported(finished_run, tmp_path, run):
    damaged, last = tmp_path / "run", finished_run / "checkpoints" / f"step-{NUM_STEPS:08d}"
    shutil.copytree(finished_run, damaged)
    data = damaged / "checkpoints" / f"step-{NUM_STEPS:08d}.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    out = tmp_path / "out"
    for arguments, message in (
        ((damaged, out), f"checkpoint of step {NUM_STEPS} in {damaged}/checkpoints is damaged"),
        ((finished_run / "checkpoints" / "step-00000005", out), "has checkpoints of the steps 3, 6"),
        ((tmp_path, out), "A model is a folder with config.json"),
        ((f"{tmp_path}/runs", out), f"There is no folder {tmp_path}/runs; did you mean {tmp_path}/run?"),
        ((finished_run, out, "--formats", "pytorch,onnx"), "optimum-cli export onnx"),
        ((finished_run, out, "--formats", "tf"), "must be pytorch, or pytorch,tf"),
        ((last, last, out, "--average"), "needs different checkpoints of one phase of one run"),
        ((last, finished_run / "export", out, "--average"), "needs different checkpoints of one phase"),
        ((last, out, "--average"), "--average needs at least two checkpoints"),
        ((last, last, out), "several checkpoints need --average"),
    ):
        assert message in run(main, *arguments).refusal
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_the_hub_is_exported(finished_run, shards, tmp_path, run):
    shutil.copytree(finished_run, tmp_path / "run")
    record = published_run(read_json(finished_run / "run.json"))
    (tmp_path / "run" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert "--tokenizer is required, because the run.json in" in run(main, tmp_path / "run", tmp_path / "out").refusal
    assert run(main, tmp_path / "run", tmp_path / "out", "--tokenizer", shards / "train" / "tokenizer").status == 0
    assert contents(tmp_path / "out") == contents(finished_run / "export")


@pytest.mark.slow
@pytest.mark.usefixtures("eagerly")
def test_the_mean_of_checkpoints_is_evaluated_and_exported(finished_run, tmp_path, run):
    steps = [finished_run / "checkpoints" / f"step-{step:08d}" for step in (3, NUM_STEPS)]
    both_files = [steps[0].with_suffix(suffix) for suffix in (".json", ".safetensors")]
    outcome = run(main, steps[1], *both_files, tmp_path / "mean", "--average")
    assert outcome.status == 0, outcome.err
    saved = [read_saved_model(str(step)) for step in steps]
    logged = saved[1].snapshot.metrics[-1]["loss"]
    match = re.search(rf"average of the steps 3, 6: validation loss ([\d.]+); {logged:.4f} at step 6", outcome.out)
    assert match
    means = load_model(str(tmp_path / "mean"))
    models = (means, *(saved_model_of(checkpoint, tmp_path) for checkpoint in saved))
    figures = [{weight.name.partition("/")[2]: weight.numpy() for weight in model.weights} for model in models]
    for name, mean in figures[0].items():
        of_both = [arrays[name].astype(np.float64) for arrays in figures[1:]]
        np.testing.assert_array_equal(mean, np.mean(of_both, axis=0).astype(mean.dtype))
    card = (tmp_path / "mean" / "README.md").read_text(encoding="utf-8")
    assert "the average of the checkpoints of steps 3, 6" in card
    assert match[1] in card
    assert _evaluate(saved[1], saved[1].snapshot.arrays)["loss"] == pytest.approx(logged, abs=1e-6)


def test_a_mean_is_evaluated_where_bfloat16_needs_xla_and_there_is_no_tpu(finished_run, monkeypatch):
    """Of a run on a machine that does not need it."""

    def show(_, config, *__):
        raise InputError(f"compiled: {config.hardware.jit_compile}, on a TPU: {config.hardware.wants_tpu}")

    saved = read_saved_model(str(finished_run))
    assert saved.record is not None
    saved.record["settings"]["hardware"] |= {"bfloat16": True, "jit_compile": False, "tpu_name": "local"}
    monkeypatch.setattr("train.has_bfloat16_instructions", lambda: False)
    monkeypatch.setattr(Pretraining, "open_run", show)
    with pytest.raises(InputError, match="compiled: None, on a TPU: False"):
        _evaluate(saved, {})


def saved_model_of(saved: SavedModel, folder: Path) -> Any:
    name = str(folder / f"step-{saved.snapshot.step} export")
    saved.write(name, None)
    return load_model(name)
