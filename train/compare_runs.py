"""Compare runs: a table of their progress, and a plot of their losses over tokens and time."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from mlm_common.cli.settings import flag
from mlm_common.errors import InputError
from mlm_common.storage import folder_and_name
from train.metrics.comparison import comparison_table, describe_mask_rates, group_comparable
from train.metrics.plots import draw_runs
from train.metrics.run_curves import read_runs

logger = logging.getLogger(__name__)

FORMATS = (".png", ".svg")


@dataclass(frozen=True)
class CompareConfig:
    """Which runs are compared."""

    runs: list[str] = field(
        metadata={"help": "The --output-dir of one or more runs, local or gs://. They may still be training."}
    )
    picture: str | None = flag(None, "Write the plot to this .png or .svg file, local or gs://.")

    def __post_init__(self) -> None:
        if self.picture is not None and PurePath(self.picture).suffix not in FORMATS:
            raise InputError(f"--picture must be a PNG or SVG file; received {self.picture}.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, warn of what does not compare, and draw the plot if asked to."""
    (config,) = parse_arguments((CompareConfig,), argv, __doc__ or "")
    log_start(__file__)
    runs = read_runs(config.runs)
    print(comparison_table(runs))
    groups = group_comparable(runs)
    for warning in filter(None, (groups, describe_mask_rates(runs))):
        logger.warning("%s", warning)
    if config.picture is not None:
        note = f"Different {groups.what}: compare each run with its baseline, not with the others." if groups else ""
        folder, name = folder_and_name(config.picture)
        folder.write_bytes(name, draw_runs(runs, note, PurePath(name).suffix[1:]))


if __name__ == "__main__":
    sys.exit(main())
