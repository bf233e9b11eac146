"""The first row of a phase, decoded: what the model sees, what it predicts, and with which weights."""

import tensorflow as tf

from train.checkpoints.resume import ResumePoint
from train.data.pipeline import ONE_PIPELINE
from train.loop.run import Phase, Run, excerpt, print_table
from train.runtime.plan import Plan
from train.step.train_step import prepare_batch


def print_first_row(run: Run, phase: Phase, plan: Plan, start: ResumePoint) -> None:
    """Read the batch of the next step, prepare it as that step does, and print its first row."""
    with tf.device("/CPU:0"):
        batch = next(iter(run.batches_from(phase, plan, start)(ONE_PIPELINE).take(1)))
        rows = prepare_batch(phase.task, phase.config.run.seed, batch, start.step)
    texts = phase.task.describe_row(rows, phase.inputs.tokenizer)
    print_table({title: excerpt(text) for title, text in texts.items()})


def print_first_rows(run: Run, plans: tuple[Plan, ...]) -> None:
    """Print the row that each phase begins with."""
    for phase, plan in zip(run.phases, plans, strict=True):
        print(f"\n{phase.name}" if phase.name else "")
        print_first_row(run, phase, plan, ResumePoint(plan.first_step))
