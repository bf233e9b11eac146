"""Shards, tokenizer and row length of a run, opened and compared with each other before TensorFlow is imported."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm_common.corpus.identity import Part, describe_possibly_shared_text, describe_shared_text
from mlm_common.errors import InputError
from mlm_common.storage import is_gcs
from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256, vocabulary_size
from tfrecord_prep.manifest import ShardSet, open_shards
from tfrecord_prep.records import first_row_ids
from train.config.learning import DataConfig
from train.data.inputs import Feature, Inputs

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingInputs(Inputs):
    """Shards, tokenizer and length that agree with each other.

    window_rows: rows that are held in memory and permuted together.
    """

    train_shards: ShardSet
    eval_shards: ShardSet | None
    tokenizer: PreTrainedTokenizerFast
    tokenizer_source: str
    max_length: int
    window_rows: int = DataConfig.shuffle_buffer_size

    @property
    def num_rows(self) -> int:
        return self.train_shards.num_rows

    @property
    def num_words(self) -> int:
        return self.train_shards.manifest.totals.num_words if self.train_shards.manifest else 0

    @property
    def num_eval_rows(self) -> int:
        return self.eval_shards.num_rows if self.eval_shards else 0

    @property
    def unigram_entropy_nats(self) -> float | None:
        """Entropy of the token frequencies of the rows to evaluate on; None without their manifest."""
        manifest = self.eval_shards.manifest if self.eval_shards else None
        return manifest.unigram_entropy_nats if manifest else None

    def has_rows_of(self, other: Inputs) -> bool:
        assert isinstance(other, TrainingInputs)
        return shard_identities(self.train_shards) == shard_identities(other.train_shards)

    def identities(self) -> dict[str, Any]:
        """Collect length, and names and checksums of the shards."""
        shards = {"train_shards": self.train_shards, "eval_shards": self.eval_shards}
        named = {name: shard_identities(shard_set) if shard_set else None for name, shard_set in shards.items()}
        return {"max_length": self.max_length, **named}

    def describe(self) -> dict[str, Any]:
        return {"train_data": _describe_shards(self.train_shards), "eval_data": _describe_shards(self.eval_shards)}

    def chunkings(self) -> list[tuple[str, str]]:
        """List the folders of the shards, and how their rows were cut; of the preflight there may be none."""
        known = [one for one in (self.train_shards, self.eval_shards) if one is not None and one.paths]
        return [(one.folder, one.manifest.chunking if one.manifest else "unknown, without a manifest") for one in known]

    def training_batches(
        self, features: Mapping[str, Feature], context: "tf.distribute.InputContext", *, seed: int, **steps: int
    ) -> "tf.data.Dataset":
        from train.data.pipeline import SampleOrder, training_batches

        shards = self.train_shards
        order = SampleOrder(shards.paths, shards.num_rows_per_shard, seed, self.window_rows)
        return training_batches(order, features, context, **steps)

    def evaluation_batches(
        self,
        features: Mapping[str, Feature],
        prepare_row: Callable[[dict[str, "tf.Tensor"]], Any],
        context: "tf.distribute.InputContext",
        *,
        global_batch_rows: int,
    ) -> "tf.data.Dataset":
        from train.data.pipeline import evaluation_batches

        assert self.eval_shards is not None
        return evaluation_batches(self.eval_shards, features, prepare_row, context, global_batch_rows=global_batch_rows)

    def num_evaluation_batches(self, global_batch_rows: int) -> int:
        return -(-self.num_eval_rows // global_batch_rows)


def open_inputs(config: DataConfig) -> TrainingInputs:
    """Open the inputs of a run and check them as far as manifests, file sizes and the tokenizer's files allow.

    Raises:
        InputError: shards that are missing, damaged or of another length than asked for; a tokenizer that is not
            the one the shards were made with; rows to evaluate on that share text with those to train on.
    """
    train_shards = open_shards(str(config.train_dataset))
    eval_shards = open_shards(config.eval_dataset) if config.eval_dataset else None
    tokenizer_source = config.tokenizer or train_shards.tokenizer_folder
    if tokenizer_source is None:
        raise InputError(f"--tokenizer is required for shards that came without one; {train_shards.folder} did.")
    tokenizer = load_tokenizer(tokenizer_source)
    # That of the manifest, or for shards without one of the first row.
    manifest = train_shards.manifest
    max_length = manifest.max_length if manifest else len(first_row_ids(train_shards.paths[0]))
    if config.max_length not in (None, max_length):
        raise InputError(
            f"--max-length must be the shards' {max_length} ({train_shards.folder}); received {config.max_length}. "
            "Leave it out, or prepare shards of that length."
        )
    for shards in (train_shards, eval_shards):
        if shards is not None:
            _check_agreement(shards, tokenizer, max_length)
    if eval_shards is not None:
        check_nothing_is_shared(train_shards, eval_shards)
    return TrainingInputs(
        train_shards, eval_shards, tokenizer, tokenizer_source, max_length, config.shuffle_buffer_size
    )


def check_phases(phases: Sequence[TrainingInputs]) -> None:
    """Compare the inputs of a run's phases; `open_inputs` has compared those within each phase.

    Raises:
        InputError: another tokenizer than the first one's; rows to evaluate on that share text with those that another
            phase trains on.
    """
    first = phases[0]
    for one in phases:
        if tokenizer_sha256(one.tokenizer) != tokenizer_sha256(first.tokenizer):
            raise InputError(
                f"All phases must have shards of one tokenizer; {one.train_shards.folder} is of that in "
                f"{one.tokenizer_source}, {first.train_shards.folder} of that in {first.tokenizer_source}. Prepare "
                "them with the same --tokenizer-name-or-path."
            )
    checked = {(one.train_shards.folder, one.eval_shards.folder) for one in phases if one.eval_shards}
    for one, other in product(phases, phases):
        if other.eval_shards and (pair := (one.train_shards.folder, other.eval_shards.folder)) not in checked:
            check_nothing_is_shared(one.train_shards, other.eval_shards)
            checked.add(pair)


def shard_identities(shards: ShardSet) -> list[str]:
    """List what identifies these shards: names, and checksums where a manifest has them."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]


def _describe_shards(shards: ShardSet | None) -> dict[str, Any] | None:
    """Collect what a manifest says about its rows, without the list of shards; only their number without a manifest."""
    if shards is None:
        return None
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in asdict(shards.manifest).items() if name != "shards"}


def _check_agreement(shards: ShardSet, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
    if shards.manifest is None:
        if (largest_id := first_row_ids(shards.paths[0]).max()) >= vocabulary_size(tokenizer):
            raise InputError(
                f"--tokenizer must be the one the shards were made with; the first row of {shards.folder} has the id "
                f"{largest_id}, and the tokenizer {vocabulary_size(tokenizer)} ids. Name that one."
            )
        return
    if shards.manifest.max_length != max_length:
        raise InputError(
            f"--eval-dataset must have rows as long as --train-dataset's {max_length}; {shards.folder} has "
            f"{shards.manifest.max_length}. Prepare both with the same --max-length."
        )
    sha256 = tokenizer_sha256(tokenizer)
    if shards.manifest.tokenizer.sha256 != sha256:
        raise InputError(
            f"--tokenizer must be the one the shards were made with; {tokenizer.name_or_path} has hash {sha256[:12]}, "
            f"the shards in {shards.folder} {shards.manifest.tokenizer.sha256[:12]}. Leave --tokenizer out, or prepare "
            "the shards again with it."
        )


def check_nothing_is_shared(train_shards: ShardSet, eval_shards: ShardSet) -> None:
    """Check that no rows to evaluate on are of text that is trained on; warn where that is unknown and may well be."""
    folders = f"{eval_shards.folder} and {train_shards.folder}"
    parts = [Part(one.manifest.corpus, one.manifest.split) for one in (train_shards, eval_shards) if one.manifest]
    shared = _describe_shared_shards(train_shards, eval_shards)
    if len(parts) == 2:
        shared = shared or describe_shared_text(*parts)
        if not shared and (reason := describe_possibly_shared_text(*parts)):
            logger.warning("%s, to evaluate and to train on, may share text, since %s.", folders, reason)
    if shared:
        raise InputError(
            f"--eval-dataset must hold no text of --train-dataset, in any phase; {folders}: {shared}. Evaluate on a "
            "split that is not trained on, made by the same prepare_tfrecord_shards.py command (--validation-percent, "
            "--validation-files)."
        )


def _describe_shared_shards(train_shards: ShardSet, eval_shards: ShardSet) -> str:
    """Describe which shards are in both folders, or copies of each other; empty where none is known to be."""
    sets = (train_shards, eval_shards)
    here, there = ({path if is_gcs(path) else os.path.realpath(path) for path in one.paths} for one in sets)
    if shared := sorted(here & there):
        return f"both have the shard {shared[0]}"
    if train_shards.manifest and eval_shards.manifest:
        of_content = {(one.num_bytes, one.num_tokens, one.crc32c): one.name for one in eval_shards.manifest.shards}
        for one in train_shards.manifest.shards:
            if copy := of_content.get((one.num_bytes, one.num_tokens, one.crc32c)):
                return f"both have the rows of a shard ({copy}, {one.name})"
    elif not (train_shards.manifest or eval_shards.manifest):
        names, other_names = (shard_identities(one) for one in sets)
        first_row, other_first_row = (first_row_ids(one.paths[0]) for one in sets)
        if names == other_names and np.array_equal(first_row, other_first_row):
            return f"both have the rows of {names[0]}"
    return ""
