"""The parts that fine-tuning adds to the loop of `train`: scores of the best checkpoint, and runs with several seeds.

Result files have the same names as in transformers' example scripts.
"""

import dataclasses
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import Settings
from finetuning.data.inputs import EncodedRows, ExampleInputs
from finetuning.loop.task import ExampleTask, Split, format_score
from mlm_common.errors import InputError
from mlm_common.storage import Folder, open_folder
from train import load_tensorflow
from train.loop import lifecycle
from train.loop.phase import make_plans
from train.loop.report import print_table
from train.loop.run import Run
from train.metrics.log import TRAIN
from train.model.computation import count_parameters

if TYPE_CHECKING:
    from train.loop.trainer import Trainer
    from train.runtime.preemption import StopRequest

logger = logging.getLogger(__name__)

# A function that runs the model on rows, and returns the values that `Task.figures` and `ExampleTask.predictions` take.
Predict = Callable[[EncodedRows], dict[str, NDArray[Any]]]
# Fewer steps than this are rarely enough to learn a task.
FEW_STEPS = 50
# Models with fewer parameters than this learn little at BERT's learning rates, but learn well at `SMALL_MODEL_RATE`.
SMALL_MODEL, SMALL_MODEL_RATE = 20e6, 5e-4
# Prefixes of the keys of `eval_results.json` whose values are not scores, or do not depend on the seed.
NO_SCORES = ("eval_samples", "eval_is_", "eval_num_", "eval_guess_", "eval_above_", "epoch")


class FinetuningJob(lifecycle.Job[Settings]):
    """The job of a fine-tuning command. Subclasses open the run and set the splits to evaluate and to predict.

    Attributes:
        needs_validation: whether a run without a validation split is an error.
        validation: {suffix of the result keys: split}, set by `open_run`. The first split decides which checkpoint is
            best.
        tests: splits to predict, set by `open_run`.
    """

    needs_validation = False
    validation: dict[str, Split]
    tests: list[Split]

    def check(self, run: Run) -> None:
        warn_of_little_training(run)
        if run.phases[0].inputs.num_eval_rows:
            return
        hint = "Use --validation-file (docs/guides/finetuning.md splits a file), or a data set with a validation split."
        if self.needs_validation:
            raise InputError(f"--seeds compares validation scores, but there is no validation split. {hint}")
        logger.info("There is no validation split, so nothing is evaluated. %s", hint)

    def print_more(self, run: Run) -> None:
        """With `--topology`, print the TPU compiler's report about a step with the longest rows.

        Raises:
            RunFailedError: the step does not fit into memory, or does not compile.
        """
        settings: Any = run.config.run
        if settings.topology is None:
            return
        load_tensorflow()
        from train.checks.preflight.preflight import build_preflight, print_step
        from train.checks.preflight.tpu_compiler import check_compiler, tpu_slice

        tpu, python = tpu_slice(settings.topology), settings.compiler_python or sys.executable
        check_compiler(python)
        (phase,), (plan,) = run.phases, make_plans(run.phases, tpu.num_replicas)
        print(f"\nThe step on the longest rows ({phase.inputs.max_length} tokens); shorter rows are faster:")
        print_step(build_preflight(phase, plan, tpu, python))

    def finish(
        self,
        trainer: "Trainer",
        figures: dict[str, float] | None,  # noqa: ARG002  (logged during training, perhaps with different settings)
        stop: "StopRequest",
    ) -> tuple[int, dict[str, float] | None]:
        """Restore the best checkpoint unless `--no-load-best-model-at-end`, and write predictions and scores."""
        from train.runtime.runtime import wait_for_workers

        step = trainer.plan.num_steps
        if trainer.run.exports_best:
            # Wait, because the other workers read the checkpoints that the chief has written.
            wait_for_workers(trainer.runtime)
            step, _ = trainer.restore_best()
        return step, self.write_results(trainer, step, lambda rows: predict(trainer, stop, rows))

    def write_results(self, trainer: "Trainer", step: int, predict: Predict) -> dict[str, float] | None:
        """Predict all splits, and write the predictions and the scores that follow from them.

        All workers predict the same rows, and only the chief writes.

        Returns:
            The metrics of the validation split, which the command prints; None without a validation split.
        """
        task = trainer.phase.task
        assert isinstance(task, ExampleTask)
        splits = [("eval", ending, split) for ending, split in self.validation.items()]
        splits += [("predict", "", split) for split in self.tests]
        results: dict[str, dict[str, Any]] = {"eval": {}, "predict": {}}
        predicted, evaluated = [], None
        for name, ending, split in splits:
            totals = predict(split.rows)
            predictions = task.predictions(totals, split)
            predicted.append((predictions, split))
            if split.is_scored:
                figures = task.compute_figures(totals, predictions, split)
                results[name] |= {f"{figure}{ending}": value for figure, value in figures.items()}
                evaluated = figures if split is task.evaluated else evaluated
                if name == "predict" and trainer.run.cluster.is_chief:
                    scores = {metric: format_score(figures[metric]) for metric in task.metrics if metric in figures}
                    shown = ", ".join(f"{metric.replace('_', ' ')} {score}" for metric, score in scores.items())
                    logger.info("Test scores, of the rows of %s: %s.", split.file, shown)
        if trainer.run.cluster.is_chief:
            folder = trainer.run.folder.files
            for predictions, split in predicted:
                folder.write_text(split.file, task.format_predictions(predictions, split))
                task.write_extra_files(folder, predictions, split)
            epoch = round(trainer.plan.row_after(step) / trainer.plan.num_rows, 4)
            losses = [line["loss"] for line in trainer.log.lines if line["split"] == TRAIN and line["step"] <= step]
            train = {"num_rows": trainer.phase.inputs.num_rows, "epoch": epoch}
            train |= {"loss": losses[-1]} if losses else {}
            if evaluated is not None:
                results["eval"] |= {f"guess_{figure}": value for figure, value in task.guess.items()}
                results["eval"]["epoch"] = epoch
                if evaluated.get("is_degenerate"):
                    logger.warning("All predictions of the validation split are the same: nothing was learned.")
                elif worse := describe_worse(task, evaluated):
                    logger.warning("On the validation split, the model is worse than a guess: %s.", worse)
            write_figures(folder, {"train": train, **results})
        return evaluated


def describe_worse(task: ExampleTask, figures: Mapping[str, float]) -> str:
    """List the scores that are worse than those of guessing without reading the text; empty if there are none.

    Args:
        task: the task, with the scores of the guess.
        figures: the scores of the model, {metric: value}.
    """
    texts = []
    for metric in task.metrics:
        if metric not in task.guess:
            continue
        score, guess = figures[metric], task.guess[metric]
        if (score > guess) if metric in task.errors else (score < guess):
            texts.append(f"{metric.replace('_', ' ')} {format_score(score)} instead of {format_score(guess)}")
    return ", ".join(texts)


def warn_of_little_training(run: Run) -> None:
    """Warn if there are too few steps to learn a task, or if the learning rate suits larger models."""
    if not run.cluster.is_chief:
        return
    plans, phase = run.plans or make_plans(run.phases, num_replicas=1), run.phases[0]
    num_steps, settings = plans[0].num_steps, phase.config.optimization
    if num_steps < FEW_STEPS and settings.max_steps is None:
        num_epochs = math.ceil(settings.num_epochs * FEW_STEPS / num_steps)
        logger.warning(
            "%s steps are rarely enough to learn a task. For at least %s, use --num-epochs %s or a smaller batch.",
            *(f"{num_steps:,}", FEW_STEPS, f"{num_epochs:,}"),
        )
    counted = count_parameters(phase.model_config)
    if counted is not None and counted.total < SMALL_MODEL and settings.learning_rate < SMALL_MODEL_RATE / 5:
        logger.warning(
            "--learning-rate %g suits larger models; a model of %.1f million parameters learns faster at about %g.",
            *(settings.learning_rate, counted.total / 1e6, SMALL_MODEL_RATE),
        )


def write_figures(folder: Folder, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `train_results.json`, `eval_results.json`, and all results together as `all_results.json`.

    Args:
        results: {"train", "eval" or "predict": {metric: value}}. The outer keys become prefixes of the keys in the
            files.
    """
    files: dict[str, dict[str, Any]] = {"all": {}}
    for split, figures in results.items():
        files[split] = {}
        for figure, value in figures.items():
            name = figure.replace("num_rows", "samples")
            is_flag = name.startswith("is_degenerate")
            files[split][name if name == "epoch" else f"{split}_{name}"] = bool(value) if is_flag else value
        files["all"] |= files[split]
    for split in ("train", "eval", "all"):
        if files[split]:
            folder.write_text(f"{split}_results.json", json.dumps(files[split], indent=4, sort_keys=True) + "\n")


def finetune(config: Settings, new_job: Callable[[], FinetuningJob[Settings]]) -> None:
    """Run the training that the settings describe.

    With `--seeds`, do one run per seed and print a table of scores.

    The run of each seed has a separate folder. Complete runs are not repeated, so the same command resumes after an
    interruption.

    Raises:
        InputError: the input is invalid, or `--seeds` is given without a validation split.
    """
    if not config.run.seeds:
        lifecycle.train_run(config, new_job())
        return
    for seed in config.run.seeds:
        job = new_job()
        job.needs_validation = True
        lifecycle.train_run(with_seed(config, seed), job)
        if config.run.dry_run:
            return
    root = open_folder(str(config.run.output_dir))
    results = {
        seed: json.loads(root.subfolder(f"seed-{seed}").read_text("eval_results.json")) for seed in config.run.seeds
    }
    table = seeds_table(results)
    root.write_text("seeds_results.json", json.dumps(table, indent=4) + "\n")
    rows = {}
    for name, figures in table["scores"].items():
        values = ", ".join(map(format_score, figures["values"]))
        title = name.removeprefix("eval_").replace("_", " ")
        mean, deviation = format_score(figures["mean"]), format_score(figures["deviation"])
        rows[title] = f"{mean}, standard deviation {deviation}, of {values}"
    print()
    print_table(rows | {"seeds": ", ".join(map(str, config.run.seeds)), "models": root.path_of("seed-…/export")})


def with_seed(config: Settings, seed: int) -> Settings:
    """Return the settings of the run with `seed`, one of `--seeds`."""
    output_dir = open_folder(str(config.run.output_dir)).path_of(f"seed-{seed}")
    run: Any = dataclasses.replace(config.run, seed=seed, seeds=[], output_dir=output_dir)
    return dataclasses.replace(config, run=run)


def seeds_table(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Compute the mean and the standard deviation (with n - 1) of each score over the seeds.

    Args:
        results: {seed: content of eval_results.json}.
    """
    names = [name for name in next(iter(results.values())) if not name.startswith(NO_SCORES)]
    scores = {}
    for name in names:
        values = [scores_of_seed[name] for scores_of_seed in results.values()]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        scores[name] = {"values": values, "mean": statistics.mean(values), "deviation": deviation}
    return {"seeds": list(results), "scores": scores}


def predict(trainer: "Trainer", stop: "StopRequest", rows: EncodedRows) -> dict[str, NDArray[Any]]:
    """Run the model on rows of a validation or test split.

    Raises:
        RunStoppedError: a shutdown was requested.
    """
    from train.runtime.preemption import RunStoppedError
    from train.step.evaluation import build_adder

    assert isinstance(trainer.phase.inputs, ExampleInputs)
    model, inputs = trainer.model, dataclasses.replace(trainer.phase.inputs, eval_rows=rows)
    add_up = build_adder(inputs, model, trainer.plan, jit_compile=trainer.computation.jit_compile)
    totals = add_up(stop) if add_up is not None else {}
    if totals is None:
        raise RunStoppedError(
            f"Stopped{stop.in_words} while predicting; training is complete. Run the same command again to predict."
        )
    return {name: np.asarray(value) for name, value in totals.items()}
