r"""Check whether a run fits on a TPU, with the TPU's compiler but without a TPU, before you pay for one.

Accepts all flags of run_mlm.py. Prints whether the run compiles and fits, and how long it would take. Memory and time
are estimates by the compiler, not measurements.

Examples:
    .venv-preflight/bin/python train/tpu_preflight.py --topology v5e-8 \
        --preset roberta-base-v5e-8 --max-length 512 --vocab-size 32000 --max-steps 20000
    .venv-preflight/bin/python train/tpu_preflight.py --topology v5e-1 \
        --preset roberta-small --bfloat16 --train-dataset work/shards/train \
        --find-batch-size
    .venv-preflight/bin/python train/tpu_preflight.py --topology v5e-8 \
        --phases recipes/bert-base-2018.yaml --vocab-size 30000
"""

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import flag
from mlm_common.errors import InputError
from train import ONEDNN_VARIABLE, load_tensorflow
from train.checks.preflight.tpu_compiler import SLICES, check_compiler, tpu_slice
from train.config.settings import parse_run_flags


@dataclass(frozen=True)
class PreflightConfig:
    """Settings of the preflight."""

    FLAG_GROUP = "Preflight"

    topology: str | None = flag(None, f"TPU slice to compile for: {SLICES}.", is_usual=True)
    find_batch_size: bool = flag(
        False, "Find the largest --per-replica-batch-size that fits, in multiples of 8 rows; compiles 2 to 8 times."
    )
    vocab_size: int | None = flag(
        None,
        "Size of the vocabulary. Together with --max-length it replaces --train-dataset and the shards of --phases, so "
        "you can run this check before you have shards.",
    )
    operations: bool = flag(False, "Also print the most expensive operations.")
    compiler_python: str | None = flag(None, "Python interpreter that has jax and libtpu. Default: this one.")

    def __post_init__(self) -> None:
        if not self.topology:
            raise InputError(f"--topology is required: the TPU slice to compile for. The slices are {SLICES}.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    config, settings = parse_run_flags(argv, __doc__, PreflightConfig, needed=("topology",))
    log_start(__file__)
    tpu = tpu_slice(str(settings.topology))
    from train.checks.preflight.report import open_run, print_plan  # imports transformers, not needed for --help
    from train.loop.report import warn_of_other_batch, warn_of_other_length

    run = open_run(config, settings.vocab_size, tpu.num_replicas)
    for phase, plan in zip(run.phases, run.plans, strict=True):
        warn_of_other_batch(phase.config, plan)
        if not phase.name:  # phases have rows of several lengths
            warn_of_other_length(phase.config, plan)
    if config.run.dry_run:
        print_plan(run, tpu)
        return
    python = settings.compiler_python or sys.executable
    check_compiler(python)
    load_tensorflow()  # only after the shards are checked
    from train.checks.preflight import preflight as stages

    print_answer = stages.print_largest_batch if settings.find_batch_size else stages.print_step
    for phase, plan in zip(run.phases, run.plans, strict=True):
        preflight = stages.build_preflight(phase, plan, tpu, python)
        if phase.name:
            print(f"\n{phase.name}\n")
        print_answer(preflight, with_operations=settings.operations)


if __name__ == "__main__":
    os.environ.setdefault(ONEDNN_VARIABLE, "0")  # oneDNN's allocator never returns memory
    run_as_script(main)
