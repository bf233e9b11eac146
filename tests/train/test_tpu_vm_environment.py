"""The whole life of a run in the environment that `install.py` makes for a TPU VM, on its CPU.

Its TensorFlow is older than this environment's may be: both make the same shards, and the same losses to rounding.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.other_environments import PROJECT, installed_environment
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_corpus import DOCUMENTS, flags
from tests.fixtures.tiny_run import run_flags
from tfrecord_prep import prepare_tfrecord_shards
from tokenizer_training import train_unigram
from train import TPUS, has_accelerator
from train.checks.preflight.tpu_compiler import COMPILER_ENVIRONMENT
from train.run_mlm import main

pytestmark = pytest.mark.slow

REPO = "alice/tiny"
COMMANDS = {
    "tokenizer_training/train_unigram.py": train_unigram.main,
    "tfrecord_prep/prepare_tfrecord_shards.py": prepare_tfrecord_shards.main,
}
NUM_STEPS = 12
# XLA for the CPU is no part of the TPU's TensorFlow.
TRAINING = (
    *("--max-steps", str(NUM_STEPS), "--log-steps", "3", "--eval-steps", "6"),
    *("--dropout", "0.1", "--jit-compile", "false"),
)


@pytest.fixture(scope="module")
def vm_python(tmp_path_factory) -> Path:
    return installed_environment(tmp_path_factory, "tpu")


def printed_by(python: str | Path, *command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [python, *command], cwd=PROJECT, env=os.environ | (environment or {}), capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def prepare(folder: Path, run: Callable[[str, list[str]], object]) -> Path:
    """Train a tokenizer and write shards with `run`, given a script and its flags; return the folder of the shards."""
    folder.mkdir()
    (folder / "docs.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8"
    )
    corpus, tokenizer = str(folder / "docs.jsonl"), str(folder / "tokenizer")
    sizes = ("--vocab-size", "48", "--byte-fallback", "false", "--validation-percent", "20", "--num-workers", "1")
    run("tokenizer_training/train_unigram.py", ["--data-files", corpus, *sizes, "--output-dir", tokenizer])
    written = flags(folder, folder / "shards", "--validation-percent", "20")
    run("tfrecord_prep/prepare_tfrecord_shards.py", written)
    return folder / "shards"


def records(shards: Path) -> dict[str, bytes]:
    return {str(path.relative_to(shards)): path.read_bytes() for path in shards.rglob("*.tfrecord")}


def losses(folder: Path) -> dict[tuple[str, int], float]:
    """Read (split, step) -> loss."""
    return {(line["split"], line["step"]): line["loss"] for line in logged(folder)}


TRIALS = """
from train.runtime import pjrt_settings
from train.runtime.child_process import ChildFailedError
print(pjrt_settings.tensorflow_api_version(), pjrt_settings.library_api_version(pjrt_settings.library_path()))
for with_pjrt in (True, False):
    try:
        pjrt_settings.try_to_connect(with_pjrt=with_pjrt)
    except ChildFailedError as error:
        print(error)
"""


@pytest.mark.skipif(has_accelerator(TPUS), reason="for a machine without a TPU")
def test_what_connecting_to_a_tpu_does_where_there_is_none(vm_python):
    """TensorFlow itself dies with its PJRT settings, and finds no platform without; neither waits for metadata."""
    versions, with_pjrt, without = printed_by(vm_python, "-c", TRIALS).splitlines()
    assert versions == "0.72 0.73"
    assert with_pjrt.startswith("crashed (SIG")
    assert without.startswith("failed: InternalError: ")


@pytest.mark.usefixtures("one_device")
def test_the_whole_life_of_a_run(vm_python, hub_server, tmp_path):
    environment = COMPILER_ENVIRONMENT | hub_server.environment
    version = "from importlib.metadata import version; print(version('tensorflow-tpu'))"
    assert printed_by(vm_python, "-c", version).startswith("2.20.")
    shards = prepare(
        tmp_path / "vm", lambda script, given: printed_by(vm_python, script, *given, environment=environment)
    )
    run = tmp_path / "vm" / "run"
    training = [*run_flags(shards, run, *TRAINING), "--hub-model-id", REPO]
    printed_by(vm_python, "train/run_mlm.py", *training, environment=environment)
    exported = {str(path.relative_to(run / "export")) for path in (run / "export").rglob("*") if path.is_file()}
    published = hub_server.files(REPO)
    assert exported <= set(published)
    assert published["model.safetensors"] == (run / "export" / "model.safetensors").read_bytes()
    filling = ("--model", str(run / "export"), "--text", "many [MASK] rows")
    filled = printed_by(vm_python, "train/fill_mask.py", *filling, environment=environment)
    assert "rows" in filled

    shards_here = prepare(tmp_path / "here", lambda script, given: COMMANDS[script](given))
    assert records(shards_here) == records(shards)
    assert main(run_flags(shards_here, tmp_path / "here" / "run", *TRAINING)) == 0
    losses_here = losses(tmp_path / "here" / "run")
    assert {("train", NUM_STEPS), ("validation", NUM_STEPS)} <= set(losses_here)
    assert losses(run) == pytest.approx(losses_here, rel=1e-5)
