"""Everything that a run prints: the plan of a dry run, the start, the first rows, the time of a step, the result.

This module can be imported without TensorFlow.
"""

import logging
import textwrap
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from mlm_common.cli.console import about, counted
from mlm_common.workers import num_cores
from train import load_tensorflow
from train.checkpoints.resume import ResumePoint, describe_resume_point, resume_point
from train.config.learning import OptimizationConfig
from train.config.presets import about_preset, read_preset
from train.config.settings import RunSettings, TrainingConfig
from train.loop.phase import Phase
from train.loop.run import Run, describe_run, device_kind, new_network
from train.metrics.log import VALIDATION
from train.metrics.step_time import describe_step_time
from train.model.computation import (
    Computation,
    count_parameters,
    describe_computation,
    planned_step_flops,
)
from train.publishing.model_card import check_card
from train.runtime.plan import FLOAT32_BYTES, Plan, num_in_checkpoint
from train.tasks.masking_rule import MaskingRule

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

# Measured speed of a training step on one CPU core with AVX2; some CPUs are twice as fast.
CPU_FLOPS_PER_SECOND = 5e10
CPU_ADVICE = (
    "; --preset tiny-cpu is made for CPUs\n"
    "To plan for a TPU, pass the same flags to train/tpu_preflight.py --topology v5e-8 --dry-run"
)
FIRST_ROW = "first row"
# Evaluation leaves this fraction of the masked tokens unchanged. A model that ignores the context can copy them, which
# gains at most the same fraction of the frequency baseline.
COPIED_FRACTION = 1 - MaskingRule.mask_token_rate - MaskingRule.random_token_rate
# A gain that is only a little larger may come from the frequencies of tokens near a mask.
CLEAR_GAIN_NATS = 0.3
# Maximum number of characters of a row to show, and number of characters per line.
MAX_EXCERPT = 200
EXCERPT_WIDTH = 76


def print_plan(run: Run) -> None:
    """Print what the run would do, and check its model card.

    Imports TensorFlow only if the weights cannot be counted without it.
    """
    first, plans = run.phases[0], run.plans
    if run.config.hardware.wants_tpu:
        print(f"The TPU is not claimed yet; assuming {counted(plans[0].num_replicas, 'replica')}.")
    num_parameters, num_with_one_moment = _count_weights(first)
    newest = run.checkpoint_to_resume
    for phase, plan in zip(run.phases, plans, strict=True):
        start = ResumePoint(plan.first_step)
        resumed = {}
        if newest is not None and newest.plan.phase_index == phase.index:
            start = resume_point(newest, plan)
            resumed = {"start": f"resuming at step {newest.step:,} of {plan.num_steps:,}"}
        rows = describe_plan(run, phase, plan, num_parameters, start, num_with_one_moment) | describe_runtime(run)
        print_table(rows | describe_time_on_cpu(phase, plan, start.step) | resumed)
        if run.has_named_phases:
            print()
    if run.has_named_phases:
        print_table(
            {"all phases": f"{counted(plans[-1].num_steps, 'step')}, {sum(plan.num_tokens for plan in plans):,} tokens"}
        )
    computation = Computation(jit_compile=False, tpu_layers=None)
    draft = describe_run(run, first, computation, num_parameters)
    check_card(draft, first.inputs.tokenizer, first.model_config)


def _count_weights(phase: Phase) -> tuple[int, int]:
    """Count the weights, and the weights with only one moment; build the model only if it is the only way to count."""
    if not phase.task.adds_weights:
        counted = count_parameters(phase.model_config, phase.task.model_class)
        if counted is not None:
            return counted.total, counted.in_matrices if phase.config.optimization.optimizer == "muon" else 0
    network = new_network(phase)
    from train.step.optimizer import count_with_one_moment

    return int(network.count_params()), count_with_one_moment(phase.config.optimization, network)


def describe_plan(
    run: Run, phase: Phase, plan: Plan, num_parameters: int, start: ResumePoint, num_with_one_moment: int = 0
) -> dict[str, str]:
    """Describe what a phase does after `start`, as {title: text}. Warn of an unusual batch, and of many passes."""
    warn_of_other_batch(phase.config, plan)
    if not phase.name:  # phases have rows of several lengths
        warn_of_other_length(phase.config, plan)
    inputs = run.inputs_of(phase.index)
    row = plan.row_after(start.step, start.num_skipped_rows)
    return {
        **({"phase": f"{phase.index + 1} of {plan.num_phases}: {phase.name}"} if phase.name else {}),
        **describe_learning(phase),
        **describe_numbers(plan, num_parameters, phase.inputs.num_eval_rows, num_with_one_moment),
        **phase.inputs.describe_rows(),
        **inputs.describe_sources(row, (plan.num_steps - start.step) * plan.global_batch_rows),
    }


def describe_numbers(
    plan: Plan, num_parameters: int, num_eval_rows: int = 0, num_with_one_moment: int = 0
) -> dict[str, str]:
    """Describe the numbers of a plan, as {title: text}."""
    num_with_gradients = num_parameters + num_in_checkpoint(num_parameters, num_with_one_moment)
    state_gib = num_with_gradients * FLOAT32_BYTES / 2**30
    replicas = f", on {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    steps = f"{plan.num_steps:,}"
    if plan.num_phases > 1:
        steps = f"{plan.first_step:,} to {plan.num_steps:,}"
    has_warmup = plan.num_warmup_steps and plan.first_schedule_step + plan.num_warmup_steps > plan.first_step
    warmup = f", the first {plan.num_warmup_steps:,} of them warmup" if has_warmup else ""
    return {
        "parameters": f"{num_parameters:,}",
        "rows": f"{plan.num_rows:,} of {plan.max_length} tokens",
        "global batch": f"{plan.global_batch_rows:,} rows = {plan.batch_tokens:,} tokens{replicas}",
        "steps": f"{steps}{warmup}",
        "epochs": f"{plan.num_epochs:.2f}",
        "tokens": f"{plan.num_tokens:,}",
        **_describe_intervals(plan, num_eval_rows),
        "memory": f"{state_gib:.2f} GiB per device for weights and optimizer, plus activations",
    }


def _describe_intervals(plan: Plan, num_eval_rows: int) -> dict[str, str]:

    def every(num_steps: int) -> str:
        if num_steps >= plan.num_phase_steps:
            return "at the end"
        return f"every {num_steps:,} steps" if num_steps > 1 else "every step"

    by_the_clock = f", and every {plan.save_minutes:g} minutes" if plan.save_minutes else ""
    save = f"{every(plan.save_steps)}{by_the_clock}"
    if not num_eval_rows:
        return {"save": save}
    share = f"{every(plan.eval_steps)}, about {plan.evaluation_share(num_eval_rows):.0%} of the time"
    if plan.eval_steps == plan.save_steps and not by_the_clock:
        return {"evaluate and save": share}
    return {"evaluate": share, "save": save}


def describe_learning(phase: Phase) -> dict[str, str]:
    """Describe the optimizer, the masks and the precision of a phase, as {title: text}."""
    config, optimization = phase.config, phase.config.optimization
    rate = f"learning rate {optimization.learning_rate:g}"
    if optimization.optimizer == "muon" and optimization.muon_learning_rate is not None:
        rate += f", {optimization.muon_learning_rate:g} for matrices"
    decay = f"weight decay {optimization.weight_decay_rate:g}"
    rows = {"optimizer": f"{optimization.optimizer}, {rate}, schedule {optimization.schedule}, {decay}"}
    if isinstance(config, TrainingConfig) and phase.task.card.predicts_tokens:
        units = {"token": "tokens", "whole_word": "tokens, as whole words", "span": "tokens, as spans of words"}
        rows["masks"] = f"{100 * config.masking.mlm_probability:.3g}% of the {units[config.masking.masking]}"
    return rows | {"precision": "bfloat16, weights in float32" if config.hardware.bfloat16 else "float32"}


def warn_of_other_length(config: RunSettings, plan: Plan) -> None:
    """Warn if a preset for several replicas was made for rows of a different length."""
    preset = config.model.preset if isinstance(config, TrainingConfig) else ""
    about = about_preset(preset) if preset else None
    if about is None or not about.replicas or about.replicas == 1 or plan.max_length == about.row_length:
        return
    logger.warning(
        "%s is tuned for rows of %s tokens; these have %s, so a step has %s tokens instead of %s.",
        *(preset, f"{about.row_length:,}", f"{plan.max_length:,}", f"{plan.batch_tokens:,}"),
        f"{plan.global_batch_rows * about.row_length:,}",
    )


def warn_of_other_batch(config: RunSettings, plan: Plan) -> None:
    """Warn if the preset's batch settings give a different global batch on this number of replicas."""
    preset = config.model.preset if isinstance(config, TrainingConfig) else ""
    optimization = config.optimization
    preset_replicas = about_preset(preset).replicas if preset else None
    if preset_replicas is None or preset_replicas == plan.num_replicas or optimization.global_batch_size is not None:
        return
    names = ("per_replica_batch_size", "gradient_accumulation_steps")
    preset_values = {name: getattr(OptimizationConfig, name) for name in names} | read_preset(preset)["settings"]
    if any(preset_values[name] != getattr(optimization, name) for name in names):
        return
    preset_rows = plan.global_batch_rows // plan.num_replicas * preset_replicas
    # Advise flags that give the preset's number of rows per step, if there are any.
    num_micro_batches, remainder = divmod(preset_rows, optimization.per_replica_batch_size * plan.num_replicas)
    rows_at_once, remainder_at_once = divmod(preset_rows, plan.num_replicas)
    advice = ""
    if num_micro_batches and not remainder:
        advice = f" Pass --gradient-accumulation-steps {num_micro_batches} to keep it."
    elif rows_at_once and not remainder_at_once:
        advice = f" Pass --per-replica-batch-size {rows_at_once} --gradient-accumulation-steps 1 to keep it."
    logger.warning(
        "%s is tuned for %d replica%s; on %d the global batch is %s rows instead of %s.%s",
        *(preset, preset_replicas, "s" * (preset_replicas > 1), plan.num_replicas),
        *(f"{plan.global_batch_rows:,}", f"{preset_rows:,}", advice),
    )


def describe_runtime(run: Run) -> dict[str, str]:
    """Return the row of the plan that names the runtime and why it was chosen; empty if the reason is not known."""
    is_jax = run.config.hardware.runtime == "jax"
    name = f"TensorFlow's step, executed by JAX {version('jax')}" if is_jax else "TensorFlow"
    return {"runtime": f"{name} ({run.why_runtime})"} if run.why_runtime else {}


def describe_time_on_cpu(phase: Phase, plan: Plan, step: int) -> dict[str, str]:
    """Estimate how long the steps after `step` take, as {title: text}; empty unless the run uses only CPUs."""
    flops = planned_step_flops(phase.model_config, plan, phase.num_predictions(plan))
    if flops is None or step >= plan.num_steps or not device_kind(phase.config.hardware).startswith("CPU"):
        return {}
    num_steps = (plan.num_steps - step) / (1 - plan.evaluation_share(phase.inputs.num_eval_rows))
    seconds = cpu_seconds(num_steps * flops)
    is_large = isinstance(phase.config, TrainingConfig) and "cpu" not in phase.config.model.preset
    is_advised = seconds >= 3600 and is_large and phase.task.card.predicts_tokens
    return {"time": f"{about(seconds)} on this CPU, estimated{CPU_ADVICE if is_advised else ''}"}


def cpu_seconds(flops: float) -> float:
    """Estimate the seconds that this process's CPUs need for `flops` floating-point operations."""
    return flops / (CPU_FLOPS_PER_SECOND * num_cores())


def print_start(trainer: "Trainer") -> None:
    """Print the plan, how steps are computed, where training starts or resumes, and the first row after masking."""
    from train.step.optimizer import count_with_one_moment

    computation = asdict(trainer.computation)
    start = describe_resume_point(
        *(trainer.start, trainer.plan, trainer.phase.config, trainer.versions, computation, trainer.made_by)
    )
    network = trainer.model.network
    num_with_one_moment = count_with_one_moment(trainer.phase.config.optimization, network)
    rows = describe_plan(
        trainer.run, trainer.phase, trainer.plan, network.count_params(), trainer.start, num_with_one_moment
    )
    rows |= describe_runtime(trainer.run)
    on_tpu = trainer.phase.config.hardware.wants_tpu
    if on_tpu or trainer.computation.jit_compile:
        rows["computation"] = describe_computation(computation, on_tpu=on_tpu)
    rows |= describe_time_on_cpu(trainer.phase, trainer.plan, trainer.start.step)
    print_table(rows | {"start": "\n".join(start)})
    print()
    print_first_row(trainer.run, trainer.phase, trainer.start)


def print_step_time(trainer: "Trainer", seconds: float | None) -> None:
    """Print the measured mean time of a step next to the estimated time, at the end of a phase on a TPU."""
    config = trainer.phase.config
    if seconds is None or not config.hardware.wants_tpu or not trainer.run.cluster.is_chief:
        return
    model = f"{trainer.phase.model_config.model_type}, {trainer.model.network.count_params():,} parameters"
    computation = describe_computation(asdict(trainer.computation), on_tpu=True)
    what = f"{trainer.made_by['device']}, {model}, {computation}"
    line = describe_step_time(seconds, config, trainer.plan, what=what, versions=trainer.versions)
    print(f"\n{line}\nPlease send us this line: it shows how good our estimate of the step time is.")


def describe_exported(trainer: "Trainer", step: int) -> dict[str, str]:
    """Return the row of the final table that names the step of the exported model."""
    num_steps, summarize = trainer.plan.num_steps, trainer.phase.task.summarize
    if not trainer.run.exports_best or trainer.best_evaluation() is None:
        return {"exported": f"step {step:,} of {num_steps:,}"}
    if step == num_steps:
        return {"best checkpoint": f"step {step:,} of {num_steps:,}, the last, exported"}
    text = f"step {step:,} of {num_steps:,}, exported"
    if last := trainer.log.find(num_steps, VALIDATION):
        text += f"; the last step had {summarize(last)}"
    return {"best checkpoint": text}


def print_result(phase: Phase, figures: dict[str, float] | None, where: dict[str, str]) -> None:
    """Print an evaluation with the frequency baseline, the paths in `where`, and a command to run next."""
    rows = {**(phase.task.describe(figures) if figures else {}), **where}
    entropy = phase.inputs.unigram_entropy_nats
    if figures is not None and entropy is not None and phase.task.card.predicts_tokens:
        loss = figures.get("mlm_loss", figures["loss"])  # without the loss of a second objective
        rows = {"frequency baseline": describe_baseline(entropy, loss), **rows}
    print()
    print_table(rows)
    if command := phase.task.next_command(where["model"]):
        print(f"\nnext: {command}", flush=True)


def describe_baseline(entropy_nats: float, loss: float) -> str:
    """Say how far the loss is below the frequency baseline, and whether this shows that the model uses context."""
    gain, copied = entropy_nats - loss, COPIED_FRACTION * entropy_nats
    learned = "the model is not below it yet"
    if gain >= copied + CLEAR_GAIN_NATS:
        learned = f"the model is {gain:.2f} below it, because it uses context"
    elif gain > 0:
        learned = (
            f"the model is {gain:.2f} below it; copying the tokens that masking leaves unchanged can gain {copied:.2f}"
        )
    return f"{entropy_nats:.2f}  {learned}"


def excerpt(text: str) -> str:
    cut = text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT]} …"
    return "\n".join(textwrap.wrap(cut, EXCERPT_WIDTH)) or cut


def print_table(rows: dict[str, str]) -> None:
    """Print titles and texts in two columns; a text may have several lines."""
    for title, text in rows.items():
        for index, line in enumerate(text.split("\n")):
            print(f"{'' if index else title:<22} {line}", flush=True)


def show_first_rows(run: Run) -> None:
    """Print the first row of each phase for `--dry-run`. Reading and masking it needs TensorFlow."""
    if run.config.hardware.tpu_name == "local" and run.config.hardware.wants_tpu:
        print("\nThe first row is printed when the run starts: showing it here would claim the TPU.")
        return
    load_tensorflow()
    try:
        from train.runtime.device_errors import explained_failures

        with explained_failures(run.cluster, run.folder):
            for phase, plan in zip(run.phases, run.plans, strict=True):
                print(f"\n{phase.name}" if phase.name else "")
                print_first_row(run, phase, ResumePoint(plan.first_step))
    except ImportError as error:
        logger.warning("The first row is not shown: %s", error)


def print_first_row(run: Run, phase: Phase, start: ResumePoint) -> None:
    """Print the first row of the next step's batch, masked as the model sees it. Imports TensorFlow."""
    import tensorflow as tf

    from train.data.pipeline import ONE_PIPELINE
    from train.step.train_step import prepare_batch

    with tf.device("/CPU:0"):
        batch = next(iter(run.batches_from(phase, start)(ONE_PIPELINE, num_steps=1)))
        rows = prepare_batch(phase.task, phase.config.run.seed, batch, start.step)
    texts = phase.task.describe_row(rows, phase.inputs.tokenizer)
    shown = {title: excerpt(text) for title, text in texts.items()}
    if FIRST_ROW in shown and phase.inputs.cuts_words:
        shown[FIRST_ROW] += "\n(rows are cut from the running text)"
    print_table(shown)
