"""What a run tells whoever started it: its plan, where it begins, and how it ended."""

import logging
from typing import TYPE_CHECKING

from tokenizer_training.tokenizer import vocabulary_size
from train.start import describe_start
from train.tpu_devices import expected_num_replicas

if TYPE_CHECKING:
    from train.evaluation import Evaluation
    from train.run import Run
    from train.trainer import Trainer

logger = logging.getLogger(__name__)


def print_plan(run: "Run") -> None:
    """Print what the run would do; the model is built on the CPU to count its parameters."""
    from train.model import build_masked_lm

    plan = run.plan(expected_num_replicas(run.config.hardware, run.cluster))
    if run.config.hardware.wants_tpu:
        print(f"Without claiming the TPU, {plan.num_replicas} replicas are assumed.")
    masked_lm = build_masked_lm(
        run.model_config,
        run.config.model,
        vocabulary_size=vocabulary_size(run.inputs.tokenizer),
        seed=run.config.run.seed,
    )
    print_table(plan.describe(masked_lm.count_params()))


def print_start(run: "Run", trainer: "Trainer") -> None:
    """Print where training begins or goes on, and what is not as it was."""
    start = trainer.start
    path = trainer.checkpoints.path(start.step)
    for index, text in enumerate(describe_start(start, trainer.plan, run.config, trainer.versions, path)):
        print(f"{'' if index else 'start':<22} {text}")


def log_first_row(run: "Run", trainer: "Trainer") -> None:
    """Show a person what goes in: the first training row as it is masked at the first step."""
    row_ids, masked_ids = trainer.first_masked_row()
    logger.info("first row: %s", run.inputs.tokenizer.decode(row_ids))
    logger.info("as masked: %s", run.inputs.tokenizer.decode(masked_ids))


def print_result(run: "Run", evaluation: "Evaluation | None", checkpoints: str, export_folder: str) -> None:
    """Print the last evaluation beside what frequencies alone would give, and where everything is."""
    rows = {"checkpoints": checkpoints, "model": export_folder}
    if evaluation is not None:
        rows = {
            "validation loss": f"{evaluation.loss:.4f} nats per masked token, perplexity {evaluation.perplexity:.1f}",
            "masked accuracy": f"{evaluation.masked_accuracy:.4f} of {evaluation.num_masked:,} masked tokens",
            **rows,
        }
    manifest = run.inputs.eval_shards.manifest if run.inputs.eval_shards else None
    if manifest is not None:
        entropy = f"{manifest.unigram_entropy_nats:.4f} nats: the best loss of a guess from frequencies alone"
        rows = {"unigram entropy": entropy, **rows}
    print()
    print_table(rows)


def print_table(rows: dict[str, str]) -> None:
    """Print titles and texts in two columns."""
    for title, text in rows.items():
        print(f"{title:<22} {text}")
