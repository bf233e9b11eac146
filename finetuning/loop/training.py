"""What all commands of fine-tuning do: check, connect, train by `train`'s loop, score the best checkpoint, export."""

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from finetuning.config.sources import Settings
from finetuning.data.inputs import ExampleInputs
from finetuning.data.rows import EncodedRows
from mlm_common.errors import InputError
from train.loop import run as stages
from train.loop.run import Run
from train.runtime.cluster import Cluster

if TYPE_CHECKING:
    import tensorflow as tf

    from train.loop.trainer import Trainer
    from train.runtime.preemption import StopRequest

# Runs the model on rows, for what the task keeps of each: `Task.figures` takes it.
Predict = Callable[[EncodedRows], dict[str, NDArray[Any]]]


class Job(ABC, Generic[Settings]):
    """What is special about one command: which run it opens, and which results it writes."""

    @abstractmethod
    def open_run(self, config: Settings, cluster: Cluster) -> Run:
        """Open the examples and the model to start from, before TensorFlow starts.

        Raises:
            InputError: whatever is wrong with them.
        """

    @abstractmethod
    def write_results(
        self, trainer: "Trainer", figures: dict[str, float] | None, step: int, predict: Predict
    ) -> dict[str, float] | None:
        """Write predictions of the model, and the scores that are computed from these very predictions.

        All workers of a run must predict the same rows, and the chief alone writes.

        Args:
            trainer: has the model.
            figures: logged during training, perhaps with other settings; None where nothing was evaluated.
            step: of the model.
            predict: runs the model.

        Returns:
            The figures of the validation part, which the command prints; None without one.
        """


def finetune(config: Settings, job: Job[Settings], *, needs_validation: bool = False) -> None:
    """Check all that can be checked, print the plan, connect; build, restore, fit; score, export, push.

    Raises:
        InputError: whatever is wrong with the input; with `needs_validation` also that there is no validation part.
    """
    from train.loop.run_record import print_plan, record_run

    run = stages.checked(config, job.open_run)
    if needs_validation and not run.inputs.num_evaluation_batches(1):
        raise InputError(
            "--seeds compares scores and needs a validation part; there is none. Use --validation-file, or a data set "
            "with a split validation."
        )
    if config.run.dry_run:
        print_plan(run)
        if config.run.topology is not None:
            print_compiled(run, config.run.topology, config.run.compiler_python or sys.executable)
        return
    with stages.locked_run_folder(run):
        from train.loop.fitting import fit  # TensorFlow, not for bad input
        from train.loop.trainer import restored_trainers

        strategy = stages.connect(run)
        with stages.failure_handling(run, strategy) as stop:
            run.plan(strategy.num_replicas_in_sync)
            stages.check_workers(run, strategy)
            (trainer,) = restored_trainers(run, strategy)
            record = record_run(run, trainer.plan, strategy, trainer.computation, trainer.model.network.count_params())
            publisher = stages.build_publisher(run, record)
            if publisher is not None:
                trainer.print_start()
            with stages.push_while_training(run, trainer.plan, publisher, trainer.log) as pushing:
                figures, step = fit(trainer, stop, pushing), trainer.plan.num_steps
            if config.run.load_best_model_at_end:
                stages.wait_for_workers(run, strategy)  # the others read what the chief has written
                step, figures = trainer.restore_best()
            figures = job.write_results(trainer, figures, step, functools.partial(predict, trainer, strategy, stop))
        if publisher is not None:
            trainer.publish(publisher, figures, step)


def print_compiled(run: Run, topology: str, compiler_python: str) -> None:
    """Print what the TPU's compiler says of the step on the longest rows.

    Raises:
        InputError: an unknown slice, or no compiler.
        RunFailedError: the step does not fit, or does not compile.
    """
    from train.checks.preflight.preflight import build_preflight, print_step
    from train.checks.preflight.tpu_compiler import check_compiler
    from train.checks.preflight.tpu_slices import tpu_slice

    tpu = tpu_slice(topology)
    check_compiler(compiler_python)
    plan = run.plan(tpu.num_replicas)
    print(f"\nThe step on rows of {run.inputs.max_length} tokens, the longest; of shorter ones it is faster.")
    print_step(build_preflight(run.config, run.inputs, run.task, run.model_config, plan, tpu, compiler_python))


def predict(
    trainer: "Trainer", strategy: "tf.distribute.Strategy", stop: "StopRequest", rows: EncodedRows
) -> dict[str, NDArray[Any]]:
    """Run the model on rows of the validation or the test part.

    Raises:
        RunStoppedError: it was asked to stop; the same command resumes here.
    """
    from train.loop.trainer import evaluation_of
    from train.runtime.preemption import RunStoppedError

    assert isinstance(trainer.run.inputs, ExampleInputs)
    inputs = trainer.run.inputs.with_eval_rows(rows)
    add_up = evaluation_of(inputs, trainer.model, trainer.plan, strategy, trainer.computation.jit_compile)
    totals = add_up(stop) if add_up is not None else {}
    if totals is None:
        raise RunStoppedError(
            f"Stopped{stop.in_words} while predicting; training is complete. Run the same command again to continue."
        )
    return {name: np.asarray(value) for name, value in totals.items()}
