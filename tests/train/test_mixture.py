"""A run over several sources: each source evaluated apart, and what the run says of them."""

import pytest

from tests.fixtures.finetuned_runs import run_on_one_device
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_mixture import TEXTS, WEIGHTS, mixture_flags
from tfrecord_prep.manifest import read_manifest
from train.compare_runs import source_table
from train.config.settings import parse_training_config
from train.data.shards import open_inputs
from train.metrics.log import VALIDATION
from train.metrics.run_curves import draw_run, read_runs
from train.run_mlm import main
from train.tasks.pair_pretraining import task_of


@pytest.mark.slow
def test_the_loss_of_a_source_is_that_of_an_evaluation_of_its_own(mixture_shards, mixture_run, tmp_path):
    """The evaluation is made by a run that starts from the end of the other one, and learns nothing."""
    extra_flags = (
        "--eval-dataset",
        str(mixture_shards / "back" / "validation"),
        "--max-steps",
        "1",
        "--learning-rate",
        "1e-12",
    )
    extra_flags += ("--init-from", str(mixture_run / "export"))
    run_on_one_device(main, mixture_flags(mixture_shards, tmp_path / "run", *WEIGHTS, *extra_flags), eagerly=True)
    apart, together = (logged(folder, VALIDATION)[-1] for folder in (tmp_path / "run", mixture_run))
    assert apart["loss"] == pytest.approx(together["loss_back"], rel=1e-5)


def test_the_loss_is_the_mean_of_those_of_the_sources_by_their_weights(mixture_run):
    for line in logged(mixture_run, VALIDATION):
        mean = 0.25 * line["loss_large"] + 0.5 * line["loss_small"] + 0.25 * line["loss_back"]
        assert line["loss"] == pytest.approx(mean)


def test_log_plot_table_and_card_name_the_sources(mixture_shards, mixture_run):
    (run,) = read_runs([str(mixture_run)])
    assert run.sources == sorted(TEXTS)
    svg = draw_run(run, "svg").decode()
    table = source_table([run])
    card = (mixture_run / "export" / "README.md").read_text("utf-8")
    for name in TEXTS:
        baseline = run.record["eval_data"]["sources"][name]["unigram_entropy_nats"]
        assert read_manifest(str(mixture_shards / name / "validation")).unigram_entropy_nats == baseline
        assert name in svg
        assert f", baseline {baseline:.2f}" in svg
        assert f"\n{name}" in table
        assert f"loss of {name}" in card
        assert f"| {name} | " in card
    assert "means over the sources" in card


def test_the_best_checkpoint_is_that_of_the_source_asked_for(mixture_shards, tmp_path, run):
    flags = mixture_flags(mixture_shards, tmp_path / "run", *WEIGHTS, "--dry-run", "--metric-for-best")
    assert "--metric-for-best must be one of loss, loss_back" in run(main, *flags, "eval_loss_fo").refusal
    shown = run(main, *flags, "eval_loss_small").out
    assert "small: " in shown
    assert "weight 50.000%" in shown
    config = parse_training_config([*flags, "eval_loss_small"], None)
    task = task_of(config, open_inputs(config.data))
    assert task.score({"loss": 2.0, "loss_small": 1.0}) > task.score({"loss": 1.0, "loss_small": 2.0})


def test_the_weights_of_a_phase_that_has_begun_stay(mixture_shards, mixture_run, run):
    others = ("--source-weights", "large=0.5", "small=0.25", "back=0.25")
    shown = "weight of large: 25.000% there, 50.000% now; weight of small: 50.000% there, 25.000% now"
    refused = run(main, *mixture_flags(mixture_shards, mixture_run, *others))
    assert f"contains a different run ({shown})" in refused.refusal
