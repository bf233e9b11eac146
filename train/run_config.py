"""Settings of what a run writes, and when."""

from dataclasses import dataclass
from typing import Literal

from train.config_fields import flag, require


@dataclass(frozen=True)
class RunConfig:
    """Where the run writes, how often, and its seed."""

    output_dir: str | None = flag(None, "Folder of the run, local or gs://: metrics.jsonl, checkpoints/, export/ …")
    seed: int = flag(0, "Fixes initial weights, order of rows and masks.")
    log_steps: int = flag(50, "Updates between two lines of metrics.jsonl; each reads metrics back from the device.")
    eval_steps: int | None = flag(None, "Updates between two evaluations; by default ten in a run.")
    save_steps: int | None = flag(None, "Updates between two checkpoints; by default at each evaluation.")
    save_minutes: float | None = flag(None, "Minutes after which a checkpoint is saved besides; by default never.")
    keep_checkpoints: int = flag(
        2,
        "Newest checkpoints that are kept; 2, so that a damaged one is no loss. The one of the lowest validation loss "
        "is kept besides.",
    )
    resume: Literal["auto", "must", "never"] = flag(
        "auto",
        "Go on from the newest checkpoint in --output-dir: where this very run left one (auto); or fail (must). never "
        "wants a folder without a run.",
    )
    overwrite_output_dir: bool = flag(False, "Delete the run in --output-dir, whichever it is, and start anew.")
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop",
        "What follows a loss or gradient that is not finite, or a loss that rises too far: the end of the run, or the "
        "last checkpoint before it and training without the rows since then.",
    )
    max_loss_rise: float | None = flag(
        None, "Nats by which a line's loss may exceed the median of the five lines before; by default any number."
    )
    max_rollbacks: int = flag(3, "With --on-nonfinite skip: how often in a run; then it stops.")
    supervise: bool = flag(
        False,
        "Train in a process of its own, and start it again after a crash, a lost TPU or a machine's maintenance; it "
        "goes on from the newest checkpoint.",
    )
    stall_minutes: float = flag(
        30.0, "With --supervise: a training process that shows no progress for so long is killed, and started again."
    )
    max_retries: int = flag(
        5, "With --supervise: starts in a row that may end without a step further than before; then it gives up."
    )
    retry_seconds: float = flag(10.0, "With --supervise: wait before the first of these starts; each doubles it.")
    profile: str | None = flag(
        None, "START:STOP: trace the updates after START up to STOP for TensorBoard's profiler, say 100:105."
    )
    dry_run: bool = flag(False, "Stop after all checks, with the plan printed.")

    def __post_init__(self) -> None:
        for name in ("log_steps", "eval_steps", "save_steps", "keep_checkpoints"):
            value = getattr(self, name)
            require(value is None or value >= 1, "must be at least 1", f"--{name.replace('_', '-')}", value)
        for name in ("save_minutes", "stall_minutes", "retry_seconds", "max_loss_rise"):
            value = getattr(self, name)
            require(value is None or value > 0, "must be above 0", f"--{name.replace('_', '-')}", value)
        for name in ("max_retries", "max_rollbacks"):
            value = getattr(self, name)
            require(value >= 0, "must not be negative", f"--{name.replace('_', '-')}", value)
        require(
            not self.overwrite_output_dir or self.resume != "must",
            "and --resume must must not both be given",
            "--overwrite-output-dir",
            "both",
        )
        require(0 <= self.seed < 2**31, "must lie in 0 to 2147483647", "--seed", self.seed)
        start, _, stop = (self.profile or "0:1").partition(":")
        holds = start.isdecimal() and stop.isdecimal() and int(start) < int(stop)
        require(holds, "must be START:STOP, two numbers of updates with START below STOP", "--profile", self.profile)

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The updates after which a trace begins and ends; None without one."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        return int(start), int(stop)
