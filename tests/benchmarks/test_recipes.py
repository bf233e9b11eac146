"""The queue of recipes: its verdicts, its table, and that it goes on where it was stopped."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks import recipes
from benchmarks.measuring.rounds import Times

PROJECT = Path(__file__).parents[2]
LOSSES = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=6)


def result(arm, seed, loss):
    return {
        "arm": arm,
        "flags": [arm],
        "seed": seed,
        "length": "10 steps",
        "num_steps": 10,
        "loss": loss,
        "cpu_seconds": 1.0,
        "step_cpu_seconds": 0.125,
    }


@given(LOSSES)
def test_differences_are_judged_seed_by_seed(losses):
    results = [
        result(name, seed, loss) for seed, pair in enumerate(losses) for name, loss in zip("ab", pair, strict=True)
    ]
    _, (name, num_seeds, steps, cost, loss, difference, error, verdict) = recipes.table_of(results, ["a", "b"])
    assert (name, num_seeds, steps, cost) == ("b", str(len(losses)), "10", "125")
    first, other = np.transpose(losses)
    mean, standard_error = np.mean(other - first), stats.sem(other - first)
    assert float(loss) == pytest.approx(np.mean(other), abs=6e-4)
    assert float(difference) == pytest.approx(mean, abs=6e-4)
    assert float(error) == pytest.approx(standard_error, abs=6e-4)
    expected = "cannot tell" if abs(mean) <= 2 * standard_error else "better" if mean < 0 else "worse"
    assert verdict == expected or abs(abs(mean) - 2 * standard_error) < 1e-9


def test_one_seed_tells_nothing():
    (_, (*_, verdict)) = recipes.table_of([result("a", 1, 5.0), result("b", 1, 3.0)], ["a", "b"])
    assert verdict == "cannot tell"


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    """Return what the command prints when it refuses the files of the test's folder."""

    def run():
        flags = ["--arms", str(tmp_path / "arms.yaml"), "--results", str(tmp_path / "r.jsonl"), "--steps", "3"]
        monkeypatch.setattr(sys, "argv", ["recipes.py", *flags])
        with pytest.raises(SystemExit):
            recipes.main()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: 1\n", "", "a: [--x]\n"])
def test_a_file_without_arms_is_refused(text, refusal, tmp_path):
    (tmp_path / "arms.yaml").write_text(text, encoding="utf-8")
    assert "arms.yaml must map names of arms to flags of run_mlm.py" in refusal()


def test_results_that_were_cut_off_are_refused(refusal, tmp_path):
    (tmp_path / "arms.yaml").write_text("a: --x\n", encoding="utf-8")
    (tmp_path / "r.jsonl").write_text('{"arm": "a"}\n{"arm": "b', encoding="utf-8")
    assert "must hold a JSON object on each line" in refusal()


class Program:
    """A stand-in for an arm that trains: a step takes a second, or three with Muon."""

    def __init__(self, _arguments, flags, num_steps, **settings):
        self.seconds = settings["steps_per_round"] * (3.0 if "muon" in flags else 1.0)
        self.figures = {"loss": 1 / num_steps}

    def run_round(self):
        return Times(0.0, self.seconds)

    def end(self):
        pass


def test_a_queue_gives_each_arm_as_much_time_and_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    (tmp_path / "arms.yaml").write_text("today: ''\nmuon: --optimizer muon\n", encoding="utf-8")
    started = []
    monkeypatch.setattr(recipes, "start", lambda *args, **settings: started.append(1) or Program(*args, **settings))

    def run(*flags):
        files = ["--arms", str(tmp_path / "arms.yaml"), "--results", str(tmp_path / "r.jsonl")]
        monkeypatch.setattr(sys, "argv", ["recipes.py", *files, *flags])
        recipes.main()
        return capsys.readouterr().out

    printed = run("--cpu-seconds", "30", "--num-seeds", "2")
    results = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(result["arm"], result["seed"], result["num_steps"]) for result in results] == [
        ("today", 1, 30), ("muon", 1, 10), ("today", 2, 30), ("muon", 2, 10),
    ]  # fmt: skip
    num_started = len(started)
    assert run("--cpu-seconds", "30", "--num-seeds", "2") == printed
    assert len(started) == num_started
    with pytest.raises(SystemExit):
        run("--steps", "3")
    assert "has runs of 30 CPU seconds; received 3 steps. Use a different file." in capsys.readouterr().err


@pytest.mark.slow
def test_an_arm_is_trained(shards, tmp_path):
    (tmp_path / "arms.yaml").write_text("muon: --optimizer muon --mlm-probability 0.2\n", encoding="utf-8")
    command = [sys.executable, PROJECT / "benchmarks" / "recipes.py", "--arms", tmp_path / "arms.yaml"]
    command += ["--shards", shards, "--results", tmp_path / "r.jsonl", "--steps", "3", "--num-seeds", "1"]
    subprocess.run(command, capture_output=True, check=True)
    (result,) = map(json.loads, (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines())
    assert (result["arm"], result["num_steps"]) == ("muon", 3)
    assert 0 < result["loss"] < 20
