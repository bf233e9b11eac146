"""`--reference-layers`: transformers' TensorFlow classes make the same steps as our layers."""

import json
import shutil

import pytest
import transformers

from tests.fixtures.same_run import assert_alike, logged
from tests.fixtures.tiny_models import CONFIGS, of_transformers_4
from tests.fixtures.tiny_run import NUM_STEPS, forget_checkpoint, run_flags
from train.metrics.log import TRAIN
from train.run_mlm import main

FLAG = "--reference-layers"


@of_transformers_4
@pytest.mark.usefixtures("one_device")
def test_losses_and_a_run_that_changes_between_the_two(shards, tmp_path, run):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps(CONFIGS["bert"]), encoding="utf-8")
    model = ("--pretrained-model-config", str(tmp_path / "bert"), "--dropout", "0.1")

    def train(name, *flags):
        outcome = run(main, *run_flags(shards, tmp_path / name, *model, "--log-steps", "1", *flags))
        assert outcome.status == 0, outcome.err
        return outcome.out

    train("ours")
    train("theirs", FLAG)
    losses = [[line["loss"] for line in logged(tmp_path / name, TRAIN)] for name in ("ours", "theirs")]
    assert len(losses[0]) == NUM_STEPS
    assert losses[1][:3] == pytest.approx(losses[0][:3], rel=1e-5)

    for name, flags, change in (("ours", (FLAG,), "False -> True"), ("theirs", (), "True -> False")):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} first")
        forget_checkpoint(tmp_path / f"{name} first", NUM_STEPS)
        out = " ".join(train(f"{name} first", *flags).split())
        assert f"changed since then: {FLAG} {change}" in out
        assert f"in the last bits from an uninterrupted run: {FLAG} {change}" in out
        assert_alike(tmp_path / f"{name} first", tmp_path / name, tolerance=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--preset", "tiny-cpu"), "has a TensorFlow class for, such as bert or roberta; received modernbert"),
        (("--block-attention",), "--reference-layers cannot be combined with --block-attention"),
        ((), "--reference-layers needs the TensorFlow classes of transformers 4"),
    ],
)
def test_what_it_cannot_compute_is_refused_before_the_device_is_claimed(
    flags, message, shards, tmp_path, run, monkeypatch
):
    if flags:
        monkeypatch.setattr(transformers.utils, "is_tf_available", lambda: True, raising=False)
    else:
        monkeypatch.delattr(transformers.utils, "is_tf_available", raising=False)
    monkeypatch.setattr("train.loop.lifecycle.connect", lambda *_: pytest.fail("the device was claimed"))
    outcome = run(main, *run_flags(shards, tmp_path / "run", FLAG, "--config-overrides", "num_hidden_layers=2", *flags))
    assert message in outcome.refusal
