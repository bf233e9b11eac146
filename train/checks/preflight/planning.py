"""The plan of a preflight: inputs, real or made from numbers, and the steps on a slice; without TensorFlow."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tfrecord_prep.manifest import ShardSet
from train.checks.preflight.report import counted, step_lines
from train.checks.preflight.tpu_compiler import TpuSlice
from train.config.phases import PhaseSettings, phases_of
from train.config.settings import TrainingConfig
from train.data.shards import TrainingInputs, check_phases, open_inputs
from train.runtime.plan import PhaseToPlan, Plan, make_plans, warn_of_other_batch

# Replaces the tokenizer's folder.
SYNTHETIC = "(synthetic)"
# Without shards: more than any batch has, and steps for the schedule, which does not change what a step costs.
ASSUMED_NUM_ROWS = 10**12


@dataclass(frozen=True)
class PlannedPhase:
    """A phase of a run, its inputs and its plan on a slice; without a compiler or a model."""

    phase: PhaseSettings
    inputs: TrainingInputs
    plan: Plan


def plan_phases(config: TrainingConfig, tpu: TpuSlice, vocab_size: int | None) -> list[PlannedPhase]:
    """Plan the phases of a run on a slice.

    Args:
        vocab_size: ids of the vocabulary, if there are no shards.

    Raises:
        InputError: neither shards nor numbers instead of them, or whatever `run_mlm.py` would refuse of shards and
            plan.
    """
    phases = phases_of(config)
    inputs = [_inputs(phase.config, vocab_size) for phase in phases]
    check_phases(inputs)
    plans = _plans(phases, inputs, tpu)
    for phase, plan in zip(phases, plans, strict=True):
        warn_of_other_batch(phase.config, plan)
    return [PlannedPhase(*parts) for parts in zip(phases, inputs, plans, strict=True)]


def print_plan(phases: Sequence[PlannedPhase], tpu: TpuSlice) -> None:
    for planned in phases:
        if planned.phase.name:
            print(f"\n{planned.phase.name}\n")
        plan, optimization = planned.plan, planned.phase.config.optimization
        lines = step_lines(tpu, optimization.per_replica_batch_size, plan.max_length, plan.num_micro_batches)
        if planned.inputs.train_shards.num_rows or optimization.max_steps:
            tokens = f"{plan.num_tokens:,} tokens"
            lines["run"] = f"{counted(plan.num_phase_steps, 'step')}, {tokens}"
        for title, text in lines.items():
            print(f"{title:<20} {text}")
    print("\nNothing was compiled. Without --dry-run, the TPU's compiler says if it fits and how long it takes.")


def synthetic_inputs(*, max_length: int, vocab_size: int) -> TrainingInputs:
    """Make inputs of that row length and vocabulary, without any row.

    The tokenizer has the project's special ids, and made-up words for the rest of its vocabulary.

    Raises:
        InputError: the vocabulary has no place for more than special tokens.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise InputError(f"--vocab-size must be above the {len(SPECIAL_TOKENS)} special tokens; received {vocab_size}.")
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    vocabulary |= {f"▁word{index}": index for index in range(len(vocabulary), vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # so that whole words can be masked: each token is one
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return TrainingInputs(
        train_shards=ShardSet("", (), (), num_rows=0, manifest=None, tokenizer_folder=None),
        eval_shards=None,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, **names),
        tokenizer_source=SYNTHETIC,
        max_length=max_length,
    )


def _inputs(config: TrainingConfig, vocab_size: int | None) -> TrainingInputs:
    """Open the run's inputs, or make synthetic ones from --max-length and --vocab-size."""
    max_length = config.data.max_length
    if config.data.train_dataset is not None and (vocab_size is None or config.run.phases is None):
        if vocab_size is not None:
            raise InputError(
                f"--vocab-size is only for asking without shards; received {vocab_size} and --train-dataset, whose "
                "vocabulary is known. Leave one of them out."
            )
        return open_inputs(config.data)
    if max_length is None or vocab_size is None:
        raise InputError(
            "Pass --train-dataset or, before you have shards, --max-length and --vocab-size; received --max-length "
            f"{max_length}, --vocab-size {vocab_size} and no --train-dataset."
        )
    return synthetic_inputs(max_length=max_length, vocab_size=vocab_size)


def _plans(phases: Sequence[PhaseSettings], inputs: Sequence[TrainingInputs], tpu: TpuSlice) -> tuple[Plan, ...]:
    """Plan the run on the slice; without shards there are rows enough."""
    has_shards = [one.train_shards.num_rows > 0 for one in inputs]
    numbers = [
        PhaseToPlan(
            phase.config.optimization,
            phase.config.run,
            num_rows=one.train_shards.num_rows if has_rows else ASSUMED_NUM_ROWS,
            max_length=one.max_length,
            has_separate_schedule=phase.has_separate_schedule,
            name=phase.name,
        )
        for phase, one, has_rows in zip(phases, inputs, has_shards, strict=True)
    ]
    return make_plans(tuple(numbers), tpu.num_replicas)
