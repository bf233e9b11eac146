"""Time to quality: when a curve reaches a loss, the picture, and PyTorch's side, whose losses are those of ours."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.time_to_quality import message, seconds_to
from tests.fixtures.other_environments import output_of
from train.metrics.log import read_metrics
from train.runtime.run_folder import RunFolder

PROJECT = Path(__file__).parents[2]
CURVE = [(10.0, 6.0), (20.0, 5.0), (30.0, 5.5), (40.0, 4.0)]
EVALUATE = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from transformers import AutoModelForMaskedLM
from benchmarks.peers.quality_trainer import evaluation_loss
print(evaluation_loss(AutoModelForMaskedLM.from_pretrained(sys.argv[2]), dict(np.load(sys.argv[3]))))
"""


@pytest.mark.parametrize(
    ("loss", "seconds"), [(7.0, 10.0), (5.25, 17.5), (5.0, 20.0), (4.5, 36.0 + 2 / 3), (3.9, None)]
)
def test_a_curve_reaches_a_loss_when_it_is_first_there(loss, seconds):
    assert seconds_to(loss, CURVE) == (None if seconds is None else pytest.approx(seconds))


def test_the_title_compares_ours_with_the_best_of_the_others():
    faster, slower = [(5.0, 6.0), (10.0, 3.0)], [(10.0, 6.0), (80.0, 3.5)]
    curves = {"trainer-roberta": CURVE, "trainer-modernbert": slower, "trainer-modernbert-sparse": faster}
    assert message({**curves, "ours-modernbert": CURVE}) == (
        "This project's ModernBERT does not reach the final loss of Hugging Face Trainer, sparse_prediction (3.00)",
        "It does not reach the final loss of Hugging Face Trainer (3.50).",
    )
    assert message({"trainer-modernbert": slower, "ours-modernbert": faster})[0].endswith("in 9 s instead of 80 s")
    assert message({"trainer-roberta": CURVE, "ours-modernbert": CURVE}) == ("Validation loss over training time", "")


@pytest.mark.slow
def test_pytorch_evaluates_the_rows_and_masks_of_ours(torch_python, shards, finished_run, tmp_path):
    program = PROJECT / "benchmarks" / "peers" / "quality_handover.py"
    subprocess.run([sys.executable, program, shards, "tiny-cpu", tmp_path], check=True)
    loss = output_of(
        torch_python, EVALUATE, str(PROJECT), str(finished_run / "export"), str(tmp_path / "validation.npz")
    )
    ours = [line["loss"] for line in read_metrics(RunFolder(finished_run)) if line["split"] == "validation"]
    assert float(loss) == pytest.approx(ours[-1], abs=1e-5)


@pytest.mark.slow
def test_recipes_of_both_sides_print_their_curves(torch_python, shards, tmp_path):
    names = ["trainer-roberta", "ours-modernbert"]
    flags = ["--shards", shards, "--recipes", *names, "--minutes=0.02", "--rounds=2", "--torch-python", torch_python]
    command = [sys.executable, PROJECT / "benchmarks" / "time_to_quality.py", *flags, "--picture", tmp_path / "c.png"]
    table = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    assert re.search(r"^2" + r" +\d+ +\d+\.\d{3}" * len(names) + "$", table, re.MULTILINE), table
    assert re.search(r"^ours-modernbert comes to the final loss of trainer-roberta, \d", table, re.MULTILINE), table
    assert (tmp_path / "c.png").stat().st_size > 10_000
