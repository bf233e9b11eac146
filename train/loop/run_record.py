"""What a run records and prints of itself: `run.json`, its plan, and where its results are."""

import dataclasses
import json
import platform
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.cli.command_line import commit
from mlm_common.storage import open_folder
from mlm_common.tokenizer import vocabulary_size
from train.checkpoints.resume import installed_versions
from train.config.settings import HardwareConfig
from train.config.sources import current_settings
from train.loop.run import Run
from train.runtime.plan import Plan, phase_index
from train.runtime.preset_batch import warn_of_other_batch
from train.runtime.run_folder import RECORD_NAME, read_run_record, write_run_record
from train.runtime.supervisor import supervision
from train.runtime.tpu import expected_num_replicas, local_accelerator_type
from train.tasks.task import task_record

if TYPE_CHECKING:
    import tensorflow as tf

    from train.model.computation import Computation


# Characters of a row that are shown, and of a line of them.
MAX_EXCERPT = 200
EXCERPT_WIDTH = 76


def computation_so_far(run: Run, strategy: "tf.distribute.Strategy") -> "Computation | None":
    """Read how the run's steps were computed when it began on this hardware; None where it did not."""
    from train.model.computation import recorded_computation

    if run.starts_anew or not open_folder(run.output_dir).exists(RECORD_NAME):
        return None
    record = read_run_record(run.output_dir)
    if record.get("hardware") != describe_hardware(run.config.hardware, strategy):
        return None
    if phase_index(record["plan"]) != run.index:
        return None
    return recorded_computation(record, current_settings(record["settings"], type(run.config)))


def record_run(
    run: Run, plan: Plan, strategy: "tf.distribute.Strategy", computation: "Computation", num_parameters: int
) -> dict[str, Any]:
    """Write `run.json`, once nothing can refuse the run any more, and return its content."""
    record = describe_run(run, plan, strategy, computation, num_parameters)
    if run.cluster.is_chief:
        write_run_record(run.output_dir, record)
    return record


def describe_run(
    run: Run, plan: Plan, strategy: "tf.distribute.Strategy", computation: "Computation", num_parameters: int
) -> dict[str, Any]:
    """Collect the content of `run.json`: settings, fingerprint, and how and of what the run is made."""
    plans = run.plans(plan.num_replicas)
    phases = [
        {"name": phase.name, **describe_phase(phase, own)} for phase, own in zip(run.all_phases, plans, strict=False)
    ]
    return {
        "commit": commit(),
        "versions": installed_versions(),
        "hardware": describe_hardware(run.config.hardware, strategy),
        "computation": dataclasses.asdict(computation),
        # Of a configuration, and with --init-from of its weights, that came from the Hub.
        "hub_revision": getattr(run.model_config, "_commit_hash", None),
        "tokenizer": run.inputs.tokenizer_source,
        "task": task_record(run.task),
        "num_parameters": num_parameters,
        **describe_phase(run, plan),
        **({"phases": phases} if phases else {}),
        "supervision": supervision(),
        "fingerprint": run.fingerprint,
    }


def describe_phase(run: Run, plan: Plan) -> dict[str, Any]:
    """Collect what `run.json` says of a phase, and of a run as it is in it."""
    return {
        "model_config": json.loads(run.model_config.to_json_string(use_diff=False)),
        "plan": dataclasses.asdict(plan),
        **run.inputs.describe(),
        "settings": run.config.as_dict(),
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

    plans = run.plans(expected_num_replicas(run.config.hardware, run.cluster, len(local_devices())))
    if run.config.hardware.wants_tpu:
        print(f"Without claiming the TPU, {plans[0].num_replicas} replicas are assumed.")
    network = build_network(
        run.model_config,
        run.config.model,
        vocabulary_size=vocabulary_size(run.inputs.tokenizer),
        seed=run.config.run.seed,
        model_class=run.task.model_class,
    )
    for phase, plan in zip(run.phases, plans, strict=True):
        warn_of_other_batch(phase.config, plan)
        rows = phase.describe(plan, network.count_params())
        if device_kind(run.config.hardware).startswith("CPU"):
            rows |= phase.describe_time_on_cpu(plan)
        print_table(rows)
        if run.all_phases:
            print()
    if run.all_phases:
        print_table({"all phases": f"{plans[-1].num_steps:,} steps, {sum(plan.num_tokens for plan in plans):,} tokens"})
    computation = Computation(jit_compile=False, tpu_layers=None)
    strategy = tf.distribute.get_strategy()
    draft = describe_run(run, plans[run.index], strategy, computation, network.count_params())
    check_card(draft, run.inputs.tokenizer, run.model_config)


def print_result(run: Run, figures: dict[str, float] | None, where: dict[str, str]) -> None:
    """Print the figures of an evaluation beside the frequency baseline, where everything is, and what to type next."""
    rows = {**(run.task.describe(figures) if figures else {}), **where}
    entropy = run.inputs.unigram_entropy_nats
    if figures is not None and entropy is not None and run.task.card.predicts_tokens:
        loss = figures.get("mlm_loss", figures["loss"])  # of masked tokens alone
        rows = {"frequency baseline": describe_baseline(entropy, loss), **rows}
    print()
    print_table(rows)
    if command := run.task.next_command(where["model"]):
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
