"""What a run records and prints of itself: `run.json`, its plan, and where its results are."""

import dataclasses
import json
import platform
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.cli.command_line import commit
from mlm_common.tokenizer import vocabulary_size
from train.checkpoints.resume import installed_versions
from train.config.settings import HardwareConfig
from train.loop.run import Phase, Run
from train.runtime.machines import expected_num_replicas, local_accelerator_type
from train.runtime.plan import Plan, phase_index, warn_of_other_batch
from train.runtime.supervisor import supervision
from train.tasks.task import task_record

if TYPE_CHECKING:
    import tensorflow as tf

    from train.model.computation import Computation


# Characters of a row that are shown, and of a line of them.
MAX_EXCERPT = 200
EXCERPT_WIDTH = 76


def computation_so_far(run: Run, phase: Phase, strategy: "tf.distribute.Strategy") -> "Computation | None":
    """Read how the steps of the phase were computed when it began on this hardware; None where it did not."""
    from train.model.computation import Computation

    if (phase.index == 0 and run.starts_over) or not run.folder.has_run():
        return None
    record = run.folder.read_record()
    if record.get("hardware") != describe_hardware(run.config.hardware, strategy):
        return None
    if phase_index(record["plan"]) != phase.index:
        return None
    return Computation(**record["computation"])


def describe_run(
    run: Run,
    phase: Phase,
    plan: Plan,
    strategy: "tf.distribute.Strategy",
    computation: "Computation",
    num_parameters: int,
) -> dict[str, Any]:
    """Collect the content of `run.json` in a phase: settings, fingerprint, and how and of what the run is made."""
    plans = run.plans(plan.num_replicas)
    phases = [{"name": one.name, **describe_phase(one, its)} for one, its in zip(run.phases, plans, strict=True)]
    return {
        "commit": commit(),
        "versions": installed_versions(),
        "hardware": describe_hardware(run.config.hardware, strategy),
        "computation": dataclasses.asdict(computation),
        # Of a configuration, and with --init-from of its weights, that came from the Hub.
        "hub_revision": getattr(phase.model_config, "_commit_hash", None),
        "tokenizer": phase.inputs.tokenizer_source,
        "task": task_record(phase.task),
        "num_parameters": num_parameters,
        **describe_phase(phase, plan),
        **({"phases": phases} if run.has_named_phases else {}),
        "supervision": supervision(),
        "fingerprint": run.fingerprint,
    }


def describe_phase(phase: Phase, plan: Plan) -> dict[str, Any]:
    """Collect what `run.json` says of a phase, and of a run as it is in it."""
    return {
        "model_config": json.loads(phase.model_config.to_json_string(use_diff=False)),
        "plan": dataclasses.asdict(plan),
        **phase.inputs.describe(),
        "settings": phase.config.as_dict(),
    }


def describe_hardware(config: HardwareConfig, strategy: "tf.distribute.Strategy") -> str:
    """Name what the run computes on, as in `NVIDIA H100, 2 replica(s)`."""
    return f"{device_kind(config)}, {strategy.num_replicas_in_sync} replica(s)"


def device_kind(config: HardwareConfig) -> str:
    """Name the kind of device that the run computes on, as in `NVIDIA H100`."""
    import tensorflow as tf

    if config.wants_tpu:
        local_type = local_accelerator_type() if config.tpu_name == "local" else None
        return f"TPU {local_type or ''}".strip()
    if gpus := tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
    cpu_info = Path("/proc/cpuinfo")
    model = re.search(
        r"^model name\s*: (.+)$", cpu_info.read_text(encoding="utf-8") if cpu_info.exists() else "", re.MULTILINE
    )
    return f"CPU ({model[1] if model else platform.machine()})"


def print_plan(run: Run) -> None:
    """Print what the run would do; the model is built on the CPU to count its parameters, and its card on trial."""
    import tensorflow as tf

    from train.model.build import build_network
    from train.model.computation import Computation
    from train.publishing.model_card import check_card
    from train.runtime.strategy import local_devices

    first, plans = (
        run.phases[0],
        run.plans(expected_num_replicas(run.config.hardware, run.cluster, len(local_devices()))),
    )
    if run.config.hardware.wants_tpu:
        print(f"Without claiming the TPU, {plans[0].num_replicas} replicas are assumed.")
    network = build_network(
        first.model_config,
        run.config.model,
        vocabulary_size=vocabulary_size(first.inputs.tokenizer),
        seed=run.config.run.seed,
        model_class=first.task.model_class,
    )
    for phase, plan in zip(run.phases, plans, strict=True):
        warn_of_other_batch(phase.config, plan)
        rows = phase.describe(plan, network.count_params())
        if device_kind(run.config.hardware).startswith("CPU"):
            rows |= phase.describe_time_on_cpu(plan)
        print_table(rows)
        if run.has_named_phases:
            print()
    if run.has_named_phases:
        print_table({"all phases": f"{plans[-1].num_steps:,} steps, {sum(plan.num_tokens for plan in plans):,} tokens"})
    computation = Computation(jit_compile=False, tpu_layers=None)
    strategy = tf.distribute.get_strategy()
    draft = describe_run(run, first, plans[0], strategy, computation, network.count_params())
    check_card(draft, first.inputs.tokenizer, first.model_config)


def print_result(phase: Phase, figures: dict[str, float] | None, where: dict[str, str]) -> None:
    """Print the figures of an evaluation beside the frequency baseline, where everything is, and what to type next."""
    rows = {**(phase.task.describe(figures) if figures else {}), **where}
    entropy = phase.inputs.unigram_entropy_nats
    if figures is not None and entropy is not None and phase.task.card.predicts_tokens:
        loss = figures.get("mlm_loss", figures["loss"])  # of masked tokens alone
        rows = {"frequency baseline": describe_baseline(entropy, loss), **rows}
    print()
    print_table(rows)
    if command := phase.task.next_command(where["model"]):
        print(f"\nnext: {command}", flush=True)


def describe_baseline(entropy_nats: float, loss: float) -> str:
    """Describe how far a model is below the loss of guessing from the frequencies of the tokens alone."""
    gain = entropy_nats - loss
    learned = f"the model is {gain:.2f} below it, thanks to context" if gain > 0 else "the model is not below it yet"
    return f"{entropy_nats:.2f}  {learned}"


def excerpt(text: str) -> str:
    """Cut a row of text to a few lines for `print_table`."""
    cut = text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT]} …"
    return "\n".join(textwrap.wrap(cut, EXCERPT_WIDTH)) or cut


def print_table(rows: dict[str, str]) -> None:
    """Print titles and texts in two columns; a text may have several lines."""
    for title, text in rows.items():
        for index, line in enumerate(text.split("\n")):
            print(f"{'' if index else title:<22} {line}", flush=True)
