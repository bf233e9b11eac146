"""What all commands of fine-tuning do beside `train`'s loop: score the best checkpoint, and repeat a run by seeds."""

import dataclasses
import json
import statistics
import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import Settings
from finetuning.data.inputs import ExampleInputs
from finetuning.data.rows import EncodedRows
from finetuning.loop.results import shown_score
from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from train.loop import lifecycle
from train.loop.run import Run, print_table

if TYPE_CHECKING:
    from train.loop.trainer import Trainer
    from train.runtime.preemption import StopRequest

# Runs the model on rows, for what the task keeps of each: `Task.figures` takes it.
Predict = Callable[[EncodedRows], dict[str, NDArray[Any]]]
# How the names of the figures of `eval_results.json` begin that are no scores, or do not depend on the seed.
NO_SCORES = ("eval_samples", "eval_is_", "eval_num_", "eval_guess_", "epoch")


class FinetuningJob(lifecycle.Job[Settings]):
    """What is special about one command: which run it opens, and which results it writes.

    needs_validation: whether a run without a validation part is an error.
    """

    needs_validation = False

    @abstractmethod
    def write_results(self, trainer: "Trainer", step: int, predict: Predict) -> dict[str, float] | None:
        """Write predictions of the model, and the scores that are computed from these very predictions.

        All workers of a run must predict the same rows, and the chief alone writes.

        Args:
            trainer: has the model.
            step: of the model.
            predict: runs the model.

        Returns:
            The figures of the validation part, which the command prints; None without one.
        """

    def check(self, run: Run) -> None:
        if self.needs_validation and not run.phases[0].inputs.num_evaluation_batches(1):
            raise InputError(
                "--seeds compares scores and needs a validation part; there is none. Use --validation-file, or a data "
                "set with a split validation."
            )

    def print_more(self, run: Run) -> None:
        settings: Any = run.config.run
        if settings.topology is not None:
            print_compiled(run, settings.topology, settings.compiler_python or sys.executable)

    def finish(
        self,
        trainer: "Trainer",
        figures: dict[str, float] | None,  # noqa: ARG002  (logged during training, perhaps with other settings)
        stop: "StopRequest",
    ) -> tuple[int, dict[str, float] | None]:
        """Restore the best checkpoint if asked to, predict, and write predictions and scores."""
        from train.runtime.strategy import wait_for_workers

        step = trainer.plan.num_steps
        if trainer.exports_best:
            # The others read what the chief has written.
            wait_for_workers(trainer.model.distribute_strategy, trainer.run.cluster)
            step, _ = trainer.restore_best()
        return step, self.write_results(trainer, step, lambda rows: predict(trainer, stop, rows))


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
        seed: json.loads(root.subfolder(folder_of(seed)).read_text("eval_results.json")) for seed in config.run.seeds
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
    """Make the settings of the run with that seed."""
    output_dir = open_folder(str(config.run.output_dir)).path_of(folder_of(seed))
    run: Any = dataclasses.replace(config.run, seed=seed, seeds=[], output_dir=output_dir)
    return dataclasses.replace(config, run=run)


def folder_of(seed: int) -> str:
    return f"seed-{seed}"


def seeds_table(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Collect the scores of runs {seed: content of eval_results.json}: values, mean, and standard deviation (n - 1)."""
    names = [name for name in next(iter(results.values())) if not name.startswith(NO_SCORES)]
    scores = {}
    for name in names:
        values = [one[name] for one in results.values()]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        scores[name] = {"values": values, "mean": statistics.mean(values), "deviation": deviation}
    return {"seeds": list(results), "scores": scores}


def print_compiled(run: Run, topology: str, compiler_python: str) -> None:
    """Print what the TPU's compiler says of the step on the longest rows.

    Raises:
        InputError: an unknown slice, or no compiler.
        RunFailedError: the step does not fit, or does not compile.
    """
    from train.checks.preflight.preflight import build_preflight, print_step
    from train.checks.preflight.tpu_compiler import check_compiler, tpu_slice

    tpu = tpu_slice(topology)
    check_compiler(compiler_python)
    (phase,), (plan,) = run.phases, run.plans(tpu.num_replicas)
    print(f"\nThe step on rows of {phase.inputs.max_length} tokens, the longest; of shorter ones it is faster.")
    print_step(build_preflight(run.config, phase.inputs, phase.task, phase.model_config, plan, tpu, compiler_python))


def predict(trainer: "Trainer", stop: "StopRequest", rows: EncodedRows) -> dict[str, NDArray[Any]]:
    """Run the model on rows of the validation or the test part.

    Raises:
        RunStoppedError: it was asked to stop; the same command resumes here.
    """
    from train.loop.trainer import evaluation_of
    from train.runtime.preemption import RunStoppedError

    assert isinstance(trainer.phase.inputs, ExampleInputs)
    model, inputs = trainer.model, trainer.phase.inputs.with_eval_rows(rows)
    add_up = evaluation_of(inputs, model, trainer.plan, model.distribute_strategy, trainer.computation.jit_compile)
    totals = add_up(stop) if add_up is not None else {}
    if totals is None:
        raise RunStoppedError(
            f"Stopped{stop.in_words} while predicting; training is complete. Run the same command again to continue."
        )
    return {name: np.asarray(value) for name, value in totals.items()}
