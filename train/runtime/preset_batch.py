"""What becomes of a preset's global batch on another number of replicas than it is made for."""

import logging

from train.config.presets import about_preset, preset_settings
from train.config.settings import OptimizationConfig, RunSettings
from train.runtime.plan import Plan

logger = logging.getLogger(__name__)


def warn_of_other_batch(config: RunSettings, plan: Plan) -> None:
    """Warn if a preset's batch flags, left as they are, give another global batch on this number of replicas."""
    preset, optimization = config.model.preset, config.optimization
    num_meant = about_preset(preset).replicas if preset else None
    if num_meant is None or num_meant == plan.num_replicas or optimization.global_batch_size is not None:
        return
    names = ("per_replica_batch_size", "gradient_accumulation_steps")
    of_preset = {name: getattr(OptimizationConfig, name) for name in names} | preset_settings(preset)
    if any(of_preset[name] != getattr(optimization, name) for name in names):
        return
    meant_rows = plan.global_batch_rows // plan.num_replicas * num_meant
    logger.warning(
        "%s is tuned for %d replica%s; on %d the global batch is %s rows instead of %s.%s",
        preset,
        num_meant,
        "s" * (num_meant > 1),
        plan.num_replicas,
        f"{plan.global_batch_rows:,}",
        f"{meant_rows:,}",
        _how_to_keep(meant_rows, optimization.per_replica_batch_size, plan.num_replicas),
    )


def _how_to_keep(global_batch_rows: int, rows_at_once: int, num_replicas: int) -> str:
    """Name the flags that give as many rows per step; nothing where none do."""
    num_micro_batches, rest = divmod(global_batch_rows, rows_at_once * num_replicas)
    if num_micro_batches and not rest:
        return f" Pass --gradient-accumulation-steps {num_micro_batches} to keep it."
    rows_at_once, rest = divmod(global_batch_rows, num_replicas)
    if rows_at_once and not rest:
        return f" Pass --per-replica-batch-size {rows_at_once} --gradient-accumulation-steps 1 to keep it."
    return ""
