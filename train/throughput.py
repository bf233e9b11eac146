"""How fast a run goes: step time, tokens a second, share of time spent waiting for input, share of the chips' peak."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from train.chips import chip_of, local_accelerator_type
from train.config import TrainingConfig
from train.masking_rule import num_prediction_slots
from train.model_flops import update_flops
from train.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Throughput:
    """A clock over training alone, and the rates of intervals of updates.

    Args:
        plan: of the run.
        full_speed_update_seconds: what an update would take if all replicas computed at their peak; None where that is
            not known.
    """

    def __init__(self, plan: Plan, full_speed_update_seconds: float | None):
        self._plan = plan
        self._full_speed_update_seconds = full_speed_update_seconds
        self._since_seconds = time.perf_counter()
        self._excluded_seconds = 0.0

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Within it, time does not count as training time."""
        started_seconds = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - started_seconds

    def figures(self, num_steps: int, wait_seconds: float) -> dict[str, float]:
        """Return the rates of the `num_steps` updates since the last call, in which so long was waited for input."""
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._since_seconds - self._excluded_seconds
        self._since_seconds, self._excluded_seconds = now_seconds, 0.0
        step_seconds = seconds / num_steps
        figures = {
            "step_seconds": round(step_seconds, 6),
            "tokens_per_second": round(self._plan.global_batch_rows * self._plan.max_length / step_seconds, 1),
            "input_wait_share": round(min(1.0, wait_seconds / seconds), 4),
        }
        if self._full_speed_update_seconds is not None:
            figures["mfu"] = round(self._full_speed_update_seconds / step_seconds, 4)
        return figures


def full_speed_update_seconds(config: TrainingConfig, model_config: "PretrainedConfig", plan: Plan) -> float | None:
    """Return what an update would take if all replicas computed at their peak.

    None without a TPU, on a TPU that is not this machine's or not in `train.chips`, and for a model whose operations
    cannot be counted.
    """
    if not config.hardware.wants_tpu or config.hardware.tpu_name != "local":
        return None
    chip = chip_of(local_accelerator_type())
    num_micro_batches = plan.num_replicas * config.optimization.gradient_accumulation_steps
    num_tokens = config.optimization.per_replica_batch_size * plan.max_length
    flops = update_flops(
        model_config,
        num_rows=plan.global_batch_rows,
        length=plan.max_length,
        num_predictions=num_micro_batches * num_prediction_slots(num_tokens, config.masking.mlm_probability),
        num_micro_batches=num_micro_batches,
    )
    if chip is None or flops is None:
        return None
    return flops / (plan.num_replicas * chip.peak_flops_per_second)
