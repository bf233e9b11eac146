"""Ask the TPU's compiler, without a TPU, whether a run of `run_mlm.py` compiles and fits, and how fast it would be.

Takes all flags of run_mlm.py; what it prints is modelled by the compiler, not measured.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

try:
    from mlm_common.command_line import command, log_start
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from mlm_common.errors import InputError
from mlm_common.settings import flag
from train.config.sources import parse_run_flags


@dataclass(frozen=True)
class PreflightConfig:
    """What the compiler is asked."""

    topology: str | None = flag(None, "Slice to compile for: v2-8, v3-8, v4-8, v5e-8, v5p-8, v6e-8, v3-32 …")
    find_batch_size: bool = flag(
        False, "Search the largest --per-replica-batch-size that fits, in multiples of 8 rows."
    )
    vocab_size: int | None = flag(
        None,
        "Size of the vocabulary; with --max-length in the place of --train-dataset, and of the shards of --phases.",
    )
    compiler_python: str = flag(sys.executable, "Interpreter that has jax and libtpu, where not this one.")

    def __post_init__(self) -> None:
        if not self.topology:
            raise InputError("--topology is required: the slice to compile for, as in v5e-8; received nothing.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check, lower the step on the CPU, compile it for the TPU, and print what the compiler says."""
    config, settings = parse_run_flags(argv, __doc__, PreflightConfig, needed=("topology",))
    log_start(__file__)
    from train.checks.preflight.preflight import (  # transformers, not for --help
        open_preflights,
        print_largest_batch,
        print_step,
    )

    arguments = (str(settings.topology), settings.vocab_size, settings.compiler_python)
    for name, preflight in open_preflights(config, *arguments):
        if name:
            print(f"\n{name}\n")
        if settings.find_batch_size:
            print_largest_batch(preflight)
        else:
            print_step(preflight)


if __name__ == "__main__":
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # whose allocator gives no memory back
    sys.exit(main())
