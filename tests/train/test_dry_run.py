"""`--dry-run` of pretraining and of fine-tuning: the plan of the run, in seconds, since TensorFlow is not imported."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fixtures.tiny_classification import flags as classification_flags
from tests.fixtures.tiny_models import CONFIGS
from tests.fixtures.tiny_pairs import PAIRS
from tests.fixtures.tiny_phases import phases_flags
from tests.fixtures.tiny_run import run_flags
from train.run_mlm import main

# Prints for each command and its flags the exit status, stdout, and whether TensorFlow was imported by then.
DRIVER = """
import contextlib, importlib, io, json, sys
for command, flags in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = importlib.import_module(command).main([*flags, "--dry-run"])
    print(json.dumps([status, printed.getvalue(), "tensorflow" in sys.modules]))
"""


def test_the_plan_has_the_parameters_of_the_run_and_needs_no_tensorflow(
    shards, finished_run, pair_shards, pair_run, phase_shards, classified, tiny_start, tmp_path
):
    runs = {
        "train.run_mlm": [
            (run_flags(shards, tmp_path / "run"), finished_run),
            (run_flags(pair_shards, tmp_path / "run", *PAIRS), pair_run),
            (phases_flags(phase_shards, tmp_path / "run"), None),
        ],
        "finetuning.run_classification": [(classification_flags(tiny_start, tmp_path / "run"), classified)],
    }
    commands = [(command, flags) for command, its_runs in runs.items() for flags, _ in its_runs]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(commands), capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert "card cannot be built" not in done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    finished = [run for its_runs in runs.values() for _, run in its_runs]
    for (status, plan, has_tensorflow), run in zip(answers, finished, strict=True):
        assert (status, has_tensorflow) == (0, False)
        if run is not None:
            number = json.loads((run / "run.json").read_text(encoding="utf-8"))["num_parameters"]
            assert f"\nparameters             {number:,}\n" in f"\n{plan}"
    assert not (tmp_path / "run").exists()


def test_a_network_of_which_the_arithmetic_is_not_known_is_built(shards: Path, tmp_path: Path, run) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["roformer"]), encoding="utf-8")
    model = ("--pretrained-model-config", tmp_path / "model", "--position-init", "random")
    status, plan, _ = run(main, *run_flags(shards, tmp_path / "run"), *model, "--dry-run")
    assert status == 0
    assert "parameters  " in plan
