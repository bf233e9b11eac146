"""The run of a preflight, of shards or of numbers, and its plan on a slice; without TensorFlow."""

import functools

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tfrecord_prep.manifest import ShardSet
from train.checks.preflight.report import counted, step_lines
from train.checks.preflight.tpu_compiler import TpuSlice
from train.config.settings import TrainingConfig
from train.data.shards import TrainingInputs, open_inputs
from train.loop.lifecycle import open_pretraining
from train.loop.run import Run
from train.runtime.machines import Cluster

# Replaces the tokenizer's folder.
SYNTHETIC = "(synthetic)"
# Without shards: more than any batch has, and steps for the schedule, which does not change what a step costs.
ASSUMED_NUM_ROWS = 10**12


def open_run(config: TrainingConfig, vocab_size: int | None) -> Run:
    """Open a run as `run_mlm.py` does; without shards, with `vocab_size` ids."""
    return open_pretraining(config, Cluster(), functools.partial(_inputs, vocab_size=vocab_size))


def print_plan(run: Run, tpu: TpuSlice) -> None:
    for phase, plan in zip(run.phases, run.plans(tpu.num_replicas), strict=True):
        if phase.name:
            print(f"\n{phase.name}\n")
        optimization = phase.config.optimization
        lines = step_lines(tpu, optimization.per_replica_batch_size, plan.max_length, plan.num_micro_batches)
        if phase.inputs.tokenizer_source != SYNTHETIC or optimization.max_steps:
            lines["run"] = f"{counted(plan.num_phase_steps, 'step')}, {plan.num_tokens:,} tokens"
        for title, text in lines.items():
            print(f"{title:<20} {text}")
    print("\nNothing was compiled. Without --dry-run, the TPU's compiler says if it fits and how long it takes.")


def synthetic_inputs(*, max_length: int, vocab_size: int) -> TrainingInputs:
    """Make inputs of that row length and vocabulary, without any row.

    The tokenizer has the project's special ids, and made-up words for the rest of its vocabulary.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise InputError(f"--vocab-size must be above the {len(SPECIAL_TOKENS)} special tokens; received {vocab_size}.")
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    vocabulary |= {f"▁word{index}": index for index in range(len(vocabulary), vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # so that whole words can be masked: each token is one
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return TrainingInputs(
        train_shards=ShardSet("", (), (), num_rows=ASSUMED_NUM_ROWS, manifest=None, tokenizer_folder=None),
        eval_shards=None,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, **names),
        tokenizer_source=SYNTHETIC,
        max_length=max_length,
    )


def _inputs(config: TrainingConfig, vocab_size: int | None) -> TrainingInputs:
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
