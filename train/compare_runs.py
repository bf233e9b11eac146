"""Compare runs by their metrics.jsonl: a table of where each came to, a picture of the loss over tokens and time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

try:
    from mlm_common.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from mlm_common.errors import InputError
from mlm_common.settings import flag
from mlm_common.storage import folder_and_name
from train.metrics.run_curves import comparison_table, draw_runs, read_runs


@dataclass(frozen=True)
class CompareConfig:
    """Which runs are compared."""

    runs: list[str] = field(metadata={"help": "Output folders of run_mlm.py, local or gs://; also of runs under way."})
    picture: str | None = flag(None, "PNG file to draw the loss to, local or gs://.")

    def __post_init__(self) -> None:
        if self.picture is not None and not self.picture.endswith(".png"):
            raise InputError(f"--picture must be a PNG file; received {self.picture}.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and draw the picture if asked to."""
    (config,) = parse_arguments((CompareConfig,), argv, __doc__ or "")
    log_start(__file__)
    runs = read_runs(config.runs)
    print(comparison_table(runs))
    if config.picture is not None:
        folder, name = folder_and_name(config.picture)
        folder.write_bytes(name, draw_runs(runs))


if __name__ == "__main__":
    sys.exit(main())
