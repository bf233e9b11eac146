"""What all commands of fine-tuning do beside `train`'s loop: score the best checkpoint, and repeat a run by seeds.

Results are files with the names that transformers' scripts give them.
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
from finetuning.loop.task import ExampleTask, Part, shown_score
from mlm_common.errors import InputError
from mlm_common.storage import Folder, open_folder
from train.loop import lifecycle
from train.loop.report import print_table
from train.loop.run import Run
from train.metrics.log import TRAIN
from train.model.computation import count_parameters

if TYPE_CHECKING:
    from train.loop.trainer import Trainer
    from train.runtime.preemption import StopRequest

logger = logging.getLogger(__name__)

# Runs the model on rows, for what the task keeps of each: `Task.figures` takes it.
Predict = Callable[[EncodedRows], dict[str, NDArray[Any]]]
# Fewer steps rarely teach a task.
FEW_STEPS = 50
# Smaller models, in parameters, learn little at the rates of BERT, and well at this one.
SMALL_MODEL, SMALL_MODEL_RATE = 20e6, 5e-4
# How the names of the figures of `eval_results.json` begin that are no scores, or do not depend on the seed.
NO_SCORES = ("eval_samples", "eval_is_", "eval_num_", "eval_guess_", "eval_above_", "epoch")


class FinetuningJob(lifecycle.Job[Settings]):
    """What is special about one command: which run it opens, and the parts that it predicts.

    needs_validation: whether a run without a validation part is an error.
    validation: {ending of the names of the figures: part}; the first is the one that checkpoints are chosen by.
    tests: parts to predict; set by `open_run`, like `validation`.
    """

    needs_validation = False
    validation: dict[str, Part]
    tests: list[Part]

    def check(self, run: Run) -> None:
        warn_of_little_training(run)
        if self.needs_validation and not run.phases[0].inputs.num_evaluation_batches(1):
            hint = "Use --validation-file, or a data set with a split validation."
            raise InputError(f"--seeds compares scores and needs a validation part; there is none. {hint}")

    def print_more(self, run: Run) -> None:
        """Print what the TPU's compiler says of the step on the longest rows, if asked to.

        A RunFailedError if the step does not fit, or does not compile.
        """
        settings: Any = run.config.run
        if settings.topology is None:
            return
        from train.checks.preflight.preflight import build_preflight, print_step
        from train.checks.preflight.tpu_compiler import check_compiler, tpu_slice

        tpu, python = tpu_slice(settings.topology), settings.compiler_python or sys.executable
        check_compiler(python)
        (phase,), (plan,) = run.phases, run.plans(tpu.num_replicas)
        print(f"\nThe step on rows of {phase.inputs.max_length} tokens, the longest; of shorter ones it is faster.")
        print_step(build_preflight(phase, plan, tpu, python))

    def finish(
        self,
        trainer: "Trainer",
        figures: dict[str, float] | None,  # noqa: ARG002  (logged during training, perhaps with other settings)
        stop: "StopRequest",
    ) -> tuple[int, dict[str, float] | None]:
        """Restore the best checkpoint if asked to, predict, and write predictions and scores."""
        from train.runtime.runtime import wait_for_workers

        step = trainer.plan.num_steps
        if trainer.phase.config.run.load_best_model_at_end:
            # The others read what the chief has written.
            wait_for_workers(trainer.runtime)
            step, _ = trainer.restore_best()
        return step, self.write_results(trainer, step, lambda rows: predict(trainer, stop, rows))

    def write_results(self, trainer: "Trainer", step: int, predict: Predict) -> dict[str, float] | None:
        """Write predictions of the model, and the scores that are computed from these very predictions.

        All workers of a run predict the same rows, and the chief alone writes. Return the figures of the validation
        part, which the command prints; None without one.
        """
        task = trainer.phase.task
        assert isinstance(task, ExampleTask)
        parts = [("eval", ending, part) for ending, part in self.validation.items()]
        parts += [("predict", "", part) for part in self.tests]
        results: dict[str, dict[str, Any]] = {"eval": {}, "predict": {}}
        predicted, evaluated = [], None
        for name, ending, part in parts:
            totals = predict(part.rows)
            predictions = task.predictions(totals, part)
            predicted.append((predictions, part))
            if part.is_scored:
                figures = task.figures_of(totals, predictions, part)
                results[name] |= {f"{figure}{ending}": value for figure, value in figures.items()}
                evaluated = figures if part is task.evaluated else evaluated
        if trainer.run.cluster.is_chief:
            folder = trainer.run.folder.files
            for predictions, part in predicted:
                folder.write_text(part.file, task.text_of(predictions, part))
                task.write_more(folder, predictions, part)
            epoch = round(trainer.plan.row_after(step) / trainer.plan.num_rows, 4)
            losses = [line["loss"] for line in trainer.log.lines if line["split"] == TRAIN and line["step"] <= step]
            train = {"num_rows": trainer.phase.inputs.num_rows, "epoch": epoch}
            train |= {"loss": losses[-1]} if losses else {}
            if evaluated is not None:
                results["eval"] |= {f"guess_{figure}": value for figure, value in task.guess.items()}
                results["eval"]["epoch"] = epoch
                if evaluated.get("is_degenerate"):
                    logger.warning("All predictions of the validation part are the same: nothing was learned.")
            write_figures(folder, {"train": train, **results})
        return evaluated


def warn_of_little_training(run: Run) -> None:
    """Warn of steps that are too few to learn a task, and of a learning rate for larger models."""
    if not run.cluster.is_chief:
        return
    plans, phase = run.expected_plans(with_tensorflow=False) or run.plans(1), run.phases[0]
    num_steps, settings = plans[0].num_steps, phase.config.optimization
    if num_steps < FEW_STEPS and settings.max_steps is None:
        num_epochs = math.ceil(settings.num_epochs * FEW_STEPS / num_steps)
        logger.warning(
            "%s steps are few to learn a task. For at least %s, use --num-epochs %s or a smaller batch.",
            *(f"{num_steps:,}", FEW_STEPS, f"{num_epochs:,}"),
        )
    counted = count_parameters(phase.model_config)
    if counted is not None and counted.total < SMALL_MODEL and settings.learning_rate < SMALL_MODEL_RATE / 5:
        logger.warning(
            "--learning-rate %g suits larger models; one of %.1f million parameters learns faster at about %g.",
            *(settings.learning_rate, counted.total / 1e6, SMALL_MODEL_RATE),
        )


def write_figures(folder: Folder, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `train_results.json` and `eval_results.json`, and what is in them and more as `all_results.json`.

    The names of the figures of each part, "train", "eval" or "predict", begin with the part's in the files.
    """
    files: dict[str, dict[str, Any]] = {"all": {}}
    for part, figures in parts.items():
        files[part] = {}
        for figure, value in figures.items():
            name = figure.replace("num_rows", "samples")
            is_flag = name.startswith("is_degenerate")
            files[part][name if name == "epoch" else f"{part}_{name}"] = bool(value) if is_flag else value
        files["all"] |= files[part]
    for part in ("train", "eval", "all"):
        if files[part]:
            folder.write_text(f"{part}_results.json", json.dumps(files[part], indent=4, sort_keys=True) + "\n")


def finetune(config: Settings, new_job: Callable[[], FinetuningJob[Settings]]) -> None:
    """Make the run of the settings; with `--seeds` one for each, in a separate folder, and the table of all.

    A complete run is not repeated, so the same command resumes after a stop.

    Raises:
        InputError: whatever is wrong with the input; with `--seeds` also that there is no validation part.
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
        values = ", ".join(map(shown_score, figures["values"]))
        title = name.removeprefix("eval_").replace("_", " ")
        rows[title] = f"{shown_score(figures['mean'])}, deviation {shown_score(figures['deviation'])}, of {values}"
    print()
    print_table(rows | {"seeds": ", ".join(map(str, config.run.seeds)), "models": root.path_of("seed-…/export")})


def with_seed(config: Settings, seed: int) -> Settings:
    output_dir = open_folder(str(config.run.output_dir)).path_of(f"seed-{seed}")
    run: Any = dataclasses.replace(config.run, seed=seed, seeds=[], output_dir=output_dir)
    return dataclasses.replace(config, run=run)


def seeds_table(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Collect the scores of runs {seed: content of eval_results.json}: values, mean, and standard deviation (n - 1)."""
    names = [name for name in next(iter(results.values())) if not name.startswith(NO_SCORES)]
    scores = {}
    for name in names:
        values = [one[name] for one in results.values()]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        scores[name] = {"values": values, "mean": statistics.mean(values), "deviation": deviation}
    return {"seeds": list(results), "scores": scores}


def predict(trainer: "Trainer", stop: "StopRequest", rows: EncodedRows) -> dict[str, NDArray[Any]]:
    """Run the model on rows of the validation or the test part; a RunStoppedError if it was asked to stop."""
    from train.runtime.preemption import RunStoppedError
    from train.step.evaluation import build_adder

    assert isinstance(trainer.phase.inputs, ExampleInputs)
    model, inputs = trainer.model, dataclasses.replace(trainer.phase.inputs, eval_rows=rows)
    add_up = build_adder(inputs, model, trainer.plan, jit_compile=trainer.computation.jit_compile)
    totals = add_up(stop) if add_up is not None else {}
    if totals is None:
        raise RunStoppedError(
            f"Stopped{stop.in_words} while predicting; training is complete. Run the same command again to continue."
        )
    return {name: np.asarray(value) for name, value in totals.items()}
