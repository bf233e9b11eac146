import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from mlm_common.errors import EXIT_PERMANENT, EXIT_STOPPED
from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run, logged, tensorboard_points
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_phases import phases_flags, phases_with
from tests.fixtures.tiny_run import NUM_STEPS, forget_checkpoint, run_flags
from train.model.from_pretrained import load_model
from train.publishing import model_card
from train.run_mlm import main
from train.runtime import supervisor


def losses(folder, split):
    return [line["loss"] for line in logged(folder, split)]


def host_events(trace):
    """List the names of what happened on the host in a trace of TensorFlow's profiler."""
    space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    planes = [plane for plane in space.planes if plane.name.startswith("/host:CPU")]
    events = [(plane, event) for plane in planes for line in plane.lines for event in line.events]
    return [plane.event_metadata[event.metadata_id].name for plane, event in events]


def test_a_run_leaves_its_files(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert names == {"checkpoints", "export", "loss.png", "metrics.jsonl", "run.json", "tensorboard"}
    exported = {path.name for path in (finished_run / "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= exported
    assert (finished_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    # Whoever may read one file may read all.
    files = [path for path in finished_run.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".png"}
    assert len({path.stat().st_mode for path in files}) == 1
    record = read_json(finished_run / "run.json")
    assert record["settings"]["optimization"]["learning_rate"] == 0.002
    assert set(record["versions"]) >= {"tensorflow", "transformers"}


def test_the_log_has_every_figure(finished_run):
    lines = logged(finished_run)
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (3, "validation"), (4, "train"), (6, "train"), (6, "validation"),
    ]  # fmt: skip
    assert set(lines[0]) == {
        "step", "split", "loss", "masked_accuracy", "grad_norm", "perplexity", "learning_rate", "epoch",
        "step_seconds", "tokens_per_second", "input_wait_share",
    }  # fmt: skip
    assert set(lines[1]) == {"step", "split", "loss", "masked_accuracy", "perplexity", "num_masked_tokens"}
    assert lines[1]["perplexity"] == pytest.approx(np.exp(lines[1]["loss"]))
    assert {"train/loss", "validation/loss", "train/learning_rate"} <= set(tensorboard_points(finished_run))


def test_recorded_losses(finished_run):
    """A change that should move no number must not touch these."""
    assert losses(finished_run, "train") == pytest.approx([3.91031, 3.85460, 3.80820], abs=2e-4)
    assert losses(finished_run, "validation") == pytest.approx([3.85248, 3.82666], abs=2e-4)


def test_the_export_gives_the_logits_of_the_checkpoint(finished_run):
    model = load_model(str(finished_run / "export"))
    assert model.config.max_position_embeddings == 16 + 2
    assert (model.config.pad_token_id, model.config.mask_token_id) == (1, 4)
    saved = load_file(finished_run / "checkpoints" / f"step-{NUM_STEPS:08d}.safetensors")
    table = saved["model/roberta/embeddings/word_embeddings/weight"]
    exported = model.encoder.embeddings.weight.numpy()
    # The model was trained with a padded vocabulary, whose padding stays 0.
    assert (len(table), len(exported)) == (128, 48)
    np.testing.assert_array_equal(table[:48], exported)
    assert not table[48:].any()


def test_a_stopped_run_resumes_to_the_same_end(finished_run, shards, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    forget_checkpoint(tmp_path / "run", NUM_STEPS)
    assert main(run_flags(shards, tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", finished_run)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_ctrl_c_in_the_last_evaluation_stops_and_resumes(shards, tmp_path, run):
    tell, phases = supervisor.report, []

    def report(phase, step=0):
        phases.append((phase, step))
        if phase == "evaluate" and ("train", NUM_STEPS - 1) in phases:
            os.kill(os.getpid(), signal.SIGINT)
        tell(phase, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "report", report)
        stopped = run(main, *run_flags(shards, tmp_path / "run", "--save-steps", "100"))
    assert stopped.status == EXIT_STOPPED
    assert phases.count(("evaluate", 0)) == 2
    assert "frequency baseline" not in stopped.out  # the table of a finished run
    assert f"Stopped at step {NUM_STEPS} of {NUM_STEPS}, saved. Run the same command again" in stopped.err
    assert "error:" not in stopped.err
    assert not (tmp_path / "run" / "export").exists()

    resumed = run(main, *run_flags(shards, tmp_path / "run"))
    assert resumed.status == 0
    last = logged(tmp_path / "run")[-1]
    assert (last["split"], last["step"]) == ("validation", NUM_STEPS)
    assert f"{last['loss']:.4f}" in resumed.out.partition("frequency baseline")[2]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "nothing_converted")
def test_options_of_the_step_in_a_folder_that_is_overwritten(finished_run, shards, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    flags = (
        "--bfloat16",
        "--jit-compile",
        "true",
        "--gradient-accumulation-steps",
        "2",
        "--steps-per-execution",
        "4",
        "--max-grad-norm",
        "0",
    )
    flags += ("--gradient-checkpointing", "--dropout", "0.1", "--overwrite-output-dir", "--profile", "1:5")
    flags += ("--masking", "span", "--optimizer", "lamb", "--schedule", "wsd", "--warmup-steps", "1")
    assert main(run_flags(shards, tmp_path / "run", *flags)) == 0
    assert (tmp_path / "run" / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert losses(tmp_path / "run", "train") != losses(finished_run, "train")
    lines = logged(tmp_path / "run")
    # Executions of up to four steps end where something is due.
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (3, "validation"), (4, "train"), (6, "train"), (6, "validation"),
    ]  # fmt: skip
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    (trace,) = (tmp_path / "run" / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert host_events(trace).count("train") == 3  # executions of steps 2, 3, and 4 to 5


@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_run_that_diverges_says_so_and_exports_nothing(shards, tmp_path, run):
    flags = ("--learning-rate", "1e38", "--max-grad-norm", "0", "--warmup-steps", "0", "--save-steps", "1")
    outcome = run(main, *run_flags(shards, tmp_path / "run", *flags))
    assert outcome.status == EXIT_PERMANENT
    assert "The loss or a gradient of step 2 is not finite" in outcome.error
    assert not (tmp_path / "run" / "export").exists()
    # The first loss is still that of the weights at the start; after the next one nothing is saved any more.
    assert {path.stem for path in (tmp_path / "run" / "checkpoints").glob("step-*")} == {"step-00000001"}


def test_dry_run_prints_the_plan_and_writes_nothing(shards, tmp_path, run):
    """It plans for all devices of the machine; those of the tests are two, as a machine with two GPUs has."""
    flags = run_flags(shards, tmp_path / "run", "--dry-run")
    plan = run(main, *flags).out
    for title in ("parameters", "rows", "global batch", "steps", "epochs", "tokens", "memory"):
        assert f"\n{title} " in f"\n{plan}"
    assert "global batch           8 rows = 128 tokens, on 2 replicas" in plan
    shown = dict(re.findall(r"^(first row|as masked|predicted) +(.+(?:\n {23}.+)*)", plan, re.M))
    shown = {title: " ".join(text.split()) for title, text in shown.items()}
    number, tokens = re.fullmatch(r"(\d+) of 16 tokens: (.*)", shown["predicted"]).groups()
    words = re.sub(r" \((kept|seen as [^)]+)\)", "", tokens).split()
    assert int(number) == len(words) > 0
    masks = [shown[title].count("[MASK]") for title in ("first row", "as masked")]  # text may have some, too
    assert masks[1] - masks[0] == len(words) - len(re.findall(r" \((?:kept|seen as)", tokens))
    assert "The global batch of 132 rows" in run(main, *flags, "--per-replica-batch-size", "66").refusal
    assert not (tmp_path / "run").exists()


def test_dry_run_builds_the_card_of_each_phase(phase_shards, tmp_path, caplog, monkeypatch):
    steps = []

    def build(_record, _tokenizer, publication, _files):
        steps.append(publication.step)
        return str(1 // (5 - publication.step))

    monkeypatch.setattr(model_card, "model_card", build)
    first, second, _ = phases_with()
    phases = [first | {"max_steps": 3}, second | {"max_steps": 2}]
    assert main(phases_flags(phase_shards, tmp_path / "run", phases, "--dry-run")) == 0
    assert steps == [3, 5]
    assert "the model card cannot be built, so the export will have a minimal one: ZeroDivisionError:" in caplog.text


@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_run_from_an_export_on_shards_of_the_tutorial(finished_run, shards, tmp_path):
    """Their names carry the counts, their records are tf.train.Examples; there is neither manifest nor tokenizer."""
    rows = np.random.default_rng(0).integers(5, 48, (20, 16))
    for index, part in enumerate(np.split(rows, 2)):
        with tf.io.TFRecordWriter(str(tmp_path / f"dataset-{index}-{len(part)}.tfrecord")) as writer:
            for row in part:
                features = {"input_ids": row, "attention_mask": np.ones_like(row)}
                lists = {name: tf.train.Int64List(value=values) for name, values in features.items()}
                feature = {name: tf.train.Feature(int64_list=values) for name, values in lists.items()}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    data = ("--train_dataset", str(tmp_path), "--max_length", "16", "--tokenizer", str(shards / "train" / "tokenizer"))
    extra_flags = ("--init-from", str(finished_run / "export"), "--learning-rate", "1e-12", "--log-steps", "1")
    assert main(run_flags(shards, tmp_path / "run", *data, *extra_flags, "--max-steps", "1")) == 0
    assert len(losses(tmp_path / "run", "train")) == 1
    assert losses(tmp_path / "run", "validation") == pytest.approx(losses(finished_run, "validation")[-1:], rel=1e-5)
    fingerprint = read_json(tmp_path / "run" / "run.json")["fingerprint"]
    assert fingerprint["model.init_from"] == str(finished_run / "export")


@pytest.mark.slow
def test_training_from_cloud_storage(shards, finished_run, cloud_storage):
    """Shards are read and checkpoints written by TensorFlow's own client, the rest by google-cloud-storage."""
    for source, prefix in ((shards, "shards"), (finished_run / "export", "start")):
        for name, content in contents(source).items():
            cloud_storage.put(f"{prefix}/{name}", content)
    url = cloud_storage.bucket_url
    extra_flags = ("--profile", "2:3", "--init-from", f"{url}/start")
    flags = [flag.replace(str(shards), f"{url}/shards") for flag in run_flags(shards, f"{url}/run", *extra_flags)]
    command = [sys.executable, str(Path(__file__).parents[2] / "train" / "run_mlm.py"), *flags]
    done = subprocess.run(command, env=os.environ | cloud_storage.environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    names = set(cloud_storage.objects())
    assert {"run/export/model.safetensors", "run/metrics.jsonl", "run/loss.png", "run/run.json"} <= names
    assert any(name.startswith("run/checkpoints/step-00000006") for name in names)
    assert any(re.fullmatch(r"run/tensorboard/plugins/profile/.*\.xplane\.pb", name) for name in names)
