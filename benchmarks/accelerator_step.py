"""Compare our train step, executed by JAX on an accelerator, with PyTorch's ModernBERT on the same device.

    python benchmarks/accelerator_step.py lower FOLDER --shards runs/quickstart/shards
    python benchmarks/accelerator_step.py run FOLDER

`lower` runs on any machine with TensorFlow, and writes a few megabytes: the steps of roberta-base and modernbert-base,
with the reference layers, with the TPU-optimized layers, and with Muon; and 300 steps of the quick start's model, with
their losses on the CPU. `run` runs on the machine with the accelerator; it needs JAX and NumPy, but not TensorFlow, and
measures PyTorch if torch is installed. It writes FOLDER/results.json. For a TPU, lower with `--tpu`.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.rounds import PEERS, MeasuredProgram, Times, measure_in_turns, start_program
from benchmarks.measuring.tables import median_and_range, print_table

OURS, TORCH = "accelerator_program.py", "accelerator_torch.py"
# Ways to compute attention in PyTorch. The second, for GPUs, skips positions outside the window of local layers.
TORCH_ATTENTION = ("sdpa", "flex_attention")
VARIANTS = {
    "reference layers": ("--tpu-layers", "off"),
    "TPU layers": ("--tpu-layers", "on"),
    "Muon": ("--tpu-layers", "on", "--optimizer", "muon"),
}
VOCAB_SIZE = 32_000
ROWS = (16, 64)
PRESETS = ("roberta-base", "modernbert-base")
# Largest allowed relative differences between the first losses on the device and on the CPU. Later losses differ by up
# to 1% merely because sums are computed in a different order, even between versions of XLA on the same CPU.
TOLERANCES = {"short-float32": 1e-4, "short-bfloat16": 1e-2}
NUM_FOLLOWED_STEPS = 50
# {part of JAX's name for a kind of device: peak operations per second of one device in bfloat16}.
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}
NAME_DEVICE = "import jax; print(jax.devices()[0].device_kind)"
HEADER = "step|tokens/s|(from-to)|ms|MFU|peak GB|compiled in s|from the cache|host ms"


def lower(folder: Path, arguments: argparse.Namespace) -> None:
    """Write all steps, and the losses of the short runs on the CPU."""
    import train  # noqa: F401  (before TensorFlow)
    from benchmarks.peers.accelerator_lowered import write_base_step, write_short_run

    folder.mkdir(parents=True, exist_ok=True)
    on_tpu = ("--tpu-name", "local") if arguments.tpu else ()
    tiny = ("--config-overrides", "num_hidden_layers=1,hidden_size=64,num_attention_heads=2,intermediate_size=64")
    length, vocab_size = (32, 500) if arguments.tiny else (512, VOCAB_SIZE)
    steps: dict[str, Any] = {}
    for preset in arguments.presets:
        for rows in (2,) if arguments.tiny else ROWS:
            for variant in arguments.variants:
                batch = ("--per-replica-batch-size", str(rows), "--gradient-accumulation-steps", "1")
                flags = ["--preset", preset, *batch, "--max-length", str(length), "--bfloat16", *on_tpu]
                group = f"{preset}-{rows}"
                name = f"{group}, {variant}"
                flags += [*VARIANTS[variant], *(tiny if arguments.tiny else ())]
                steps[name] = {"group": group, **write_base_step(folder, name, flags, vocab_size)}
                print(f"{name} is lowered", flush=True)
    for name in TOLERANCES:
        flags = ["--preset", "tiny-cpu", "--train-dataset", f"{arguments.shards}/train", *on_tpu]
        precision = ("--bfloat16",) if name.endswith("bfloat16") else ()
        steps[name] = write_short_run(folder, name, [*flags, *precision], arguments.num_steps)
    write_index(folder, steps)
    for name in TOLERANCES:
        steps[name]["cpu_losses"] = losses_of(folder, name, {"JAX_PLATFORMS": "cpu"})
    write_index(folder, steps)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f} MB")


def write_index(folder: Path, steps: dict[str, Any]) -> None:
    (folder / "index.json").write_text(json.dumps({"steps": steps}, indent=1), encoding="utf-8")


def losses_of(folder: Path, name: str, environment: dict[str, str]) -> list[float]:
    """Run the steps of a short run and return their losses."""
    command = [sys.executable, str(PEERS / OURS), str(folder), name, "--losses"]
    output = subprocess.check_output(command, env={**os.environ, **environment}, encoding="utf-8")
    return list(json.loads(output.splitlines()[-1]))


def run(folder: Path, arguments: argparse.Namespace) -> None:
    """Compare the losses, measure the steps, print the tables and write the results."""
    steps = json.loads((folder / "index.json").read_text(encoding="utf-8"))["steps"]
    device = subprocess.check_output([sys.executable, "-c", NAME_DEVICE], encoding="utf-8").strip()
    results: dict[str, Any] = {}
    for name, tolerance in () if arguments.without_losses else TOLERANCES.items():
        losses, expected = losses_of(folder, name, {}), steps[name]["cpu_losses"]
        differences = [abs(loss / cpu_loss - 1) for loss, cpu_loss in zip(losses, expected, strict=True)]
        first, largest = max(differences[:NUM_FOLLOWED_STEPS]), max(differences)
        verdict = "follow" if first <= tolerance else "DO NOT FOLLOW"
        followed = f"the first {len(differences[:NUM_FOLLOWED_STEPS])} of {len(expected)} losses {verdict} the CPU's"
        print(f"{device}, {name}: {followed}, within {first:.1e}; all are within {largest:.1e}", flush=True)
        results[name] = {"losses": losses, "first_differ_by": first, "all_differ_by": largest, "tolerance": tolerance}
    peak = next((value for kind, value in PEAKS.items() if kind in device), None)
    has_torch = importlib.util.find_spec("torch") is not None and not arguments.without_torch and "TPU" not in device
    settings = {"steps_per_round": arguments.steps_per_round}
    together = arguments.start_together
    rows = []
    for group in arguments.only or dict.fromkeys(step["group"] for step in steps.values() if "group" in step):
        of_group = [name for name, step in steps.items() if step.get("group") == group]
        contenders = {name: (OURS, name, settings) for name in of_group if name.endswith(tuple(arguments.variants))}
        if has_torch and group.startswith("modernbert"):
            (first, *_) = of_group
            for attention in arguments.torch_attention or TORCH_ATTENTION[: 1 if device == "cpu" else None]:
                with_attention = {**settings, "attention": attention}
                contenders[f"{group}, PyTorch, {attention}"] = (TORCH, first, with_attention)
        programs: dict[str, MeasuredProgram] = {}

        def start(label: str, contenders: Any = contenders, programs: Any = programs) -> MeasuredProgram:
            script, name, settings = contenders[label]
            programs[label] = start_program(label, script, [str(folder), name], settings, wait=not together)
            return programs[label]

        times = measure_in_turns(start, list(contenders), arguments.rounds, started_warm=not together)
        for label, (_, name, _) in contenders.items():
            results[label], cells = figures_of(steps[name], times[label], programs[label].figures, peak, settings)
            rows.append([label, *cells])
        (folder / "results.json").write_text(json.dumps({"device": device, "results": results}), encoding="utf-8")
    print(device)
    print_table(HEADER, rows)


def figures_of(
    step: dict[str, Any], times: list[Times], figures: dict[str, float], peak: float | None, settings: dict[str, int]
) -> tuple[dict[str, Any], list[str]]:
    """Return the results of a step to write to the file, and the cells of its row in the table."""
    seconds = [round_times.seconds / settings["steps_per_round"] for round_times in times]
    (num_rows, length), _ = next(iter(step["batch"].values()))
    rates = [num_rows * length / step_seconds for step_seconds in seconds]
    median_seconds = sorted(seconds)[len(seconds) // 2]
    mfu = step["flops"] / median_seconds / peak if peak and step["flops"] else None
    cells = [
        *median_and_range(rates, ",.0f"),
        f"{1e3 * median_seconds:.1f}",
        f"{mfu:.3f}" if mfu else "",
        f"{figures['peak_bytes'] / 1e9:.1f}" if figures["peak_bytes"] else "",
        f"{figures['compile_seconds']:.0f}",
        f"{figures['cached_seconds']:.1f}" if "cached_seconds" in figures else "",
        f"{figures['host_ms']:.2f}" if "host_ms" in figures else "",
    ]
    return {"step_seconds": seconds, "mfu": mfu, **figures}, cells


def main() -> None:
    """Run the half of the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=("lower", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS, help="Variants of our step.")
    lowering = parser.add_argument_group("lower")
    lowering.add_argument("--shards", help="Folder with train/, shards of real text.")
    lowering.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    lowering.add_argument("--num-steps", type=int, default=300, help="Number of steps of the short runs.")
    lowering.add_argument("--tpu", action="store_true", help="Lower for a TPU.")
    lowering.add_argument("--tiny", action="store_true", help="Use tiny models, to try out the benchmark.")
    running = parser.add_argument_group("run")
    running.add_argument("--only", nargs="+", help="Presets and numbers of rows to time, such as modernbert-base-64.")
    running.add_argument(
        "--torch-attention", nargs="+", choices=TORCH_ATTENTION, help="Default: sdpa, or both on GPUs."
    )
    running.add_argument(
        "--start-together", action="store_true", help="Compile all steps at once, which distorts compile times."
    )
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--steps-per-round", type=int, default=20)
    running.add_argument("--without-torch", action="store_true")
    running.add_argument("--without-losses", action="store_true", help="Only time the steps.")
    arguments = parser.parse_args()
    if arguments.half == "run":
        run(arguments.folder, arguments)
    elif arguments.shards is None:
        parser.error("lower needs --shards")
    else:
        lower(arguments.folder, arguments)


if __name__ == "__main__":
    main()
