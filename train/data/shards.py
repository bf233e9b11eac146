"""What a run trains on, opened and held against each other before TensorFlow starts: shards, tokenizer, row length."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from tfrecord_prep.manifest import ShardSet, open_shards
from tfrecord_prep.records import first_row_ids
from tokenizer_training.corpus.record import describe_shared_text, describe_unknown, identity, record_of_split
from tokenizer_training.tokenizer import load_tokenizer, tokenizer_sha256
from train.config.settings import DataConfig
from train.data.features import Feature
from train.data.inputs import Inputs
from train.data.shuffle import SampleOrder

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
        """Rows to train on."""
        return self.train_shards.num_rows

    @property
    def unigram_entropy_nats(self) -> float | None:
        """Entropy of the token frequencies of the rows to evaluate on; None without their manifest."""
        manifest = self.eval_shards.manifest if self.eval_shards else None
        return manifest.unigram_entropy_nats if manifest else None

    def has_rows_of(self, other: Inputs) -> bool:
        """Tell whether the rows to train on are those of others."""
        assert isinstance(other, TrainingInputs)
        return shard_identities(self.train_shards) == shard_identities(other.train_shards)

    def identities(self) -> dict[str, Any]:
        """Collect length, and names and checksums of the shards."""
        shards = {"train_shards": self.train_shards, "eval_shards": self.eval_shards}
        named = {name: shard_identities(shard_set) if shard_set else None for name, shard_set in shards.items()}
        return {"max_length": self.max_length, **named}

    def describe(self) -> dict[str, Any]:
        """Collect what the manifests say."""
        return {"train_data": _describe_shards(self.train_shards), "eval_data": _describe_shards(self.eval_shards)}

    def training_batches(
        self, features: Mapping[str, Feature], context: "tf.distribute.InputContext", *, seed: int, **steps: int
    ) -> "tf.data.Dataset":
        """Read the batches of some steps; see `train.data.pipeline.training_batches`."""
        from train.data.pipeline import training_batches

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
        """Read every row to evaluate on once; see `train.data.pipeline.evaluation_batches`."""
        from train.data.pipeline import evaluation_batches

        assert self.eval_shards is not None
        return evaluation_batches(self.eval_shards, features, prepare_row, context, global_batch_rows=global_batch_rows)

    def num_evaluation_batches(self, global_batch_rows: int) -> int:
        """Count the global batches of an evaluation, the last one filled up."""
        from train.data.pipeline import num_evaluation_batches

        return num_evaluation_batches(self.eval_shards, global_batch_rows) if self.eval_shards else 0


def open_inputs(config: DataConfig) -> TrainingInputs:
    """Open the inputs of a run and check them as far as manifests, file sizes and the tokenizer's files allow.

    Raises:
        InputError: shards that are missing, damaged or of another length than asked for; a tokenizer that is not
            the one the shards were made with; rows to evaluate on that share text with those to train on.
    """
    train_shards = open_shards(str(config.train_dataset))
    eval_shards = open_shards(config.eval_dataset) if config.eval_dataset else None
    tokenizer_source = _tokenizer_source(config, train_shards)
    tokenizer = load_tokenizer(tokenizer_source)
    max_length = _row_length(config, train_shards)
    for shards in (train_shards, eval_shards):
        if shards is not None:
            _check_agreement(shards, tokenizer, max_length)
    if eval_shards is not None:
        _check_corpora(train_shards, eval_shards)
    return TrainingInputs(
        train_shards, eval_shards, tokenizer, tokenizer_source, max_length, config.shuffle_buffer_size
    )


def check_phases(phases: Sequence[TrainingInputs]) -> None:
    """Hold the inputs of a run's phases against each other.

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
        for other in phases:
            if one is not other and other.eval_shards is not None:
                _check_corpora(one.train_shards, other.eval_shards)


def shard_identities(shards: ShardSet) -> list[str]:
    """List what tells these shards from others: names, and checksums where a manifest has them."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]


def _describe_shards(shards: ShardSet | None) -> dict[str, Any] | None:
    """Collect what a manifest says about its rows, but for the list of shards; only their number without a manifest."""
    if shards is None:
        return None
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in asdict(shards.manifest).items() if name != "shards"}


def _tokenizer_source(config: DataConfig, shards: ShardSet) -> str:
    name = config.tokenizer or shards.tokenizer_folder
    if name is None:
        raise InputError(f"--tokenizer is required for shards that came without one; {shards.folder} did.")
    return name


def _row_length(config: DataConfig, shards: ShardSet) -> int:
    """Read the tokens of a row: the manifest's, or for shards without one those of the first row."""
    length = shards.manifest.max_length if shards.manifest else len(first_row_ids(shards.paths[0]))
    if config.max_length not in (None, length):
        raise InputError(
            f"--max-length must be the shards' {length} ({shards.folder}); received {config.max_length}. Leave it out, "
            "or prepare shards of that length."
        )
    return length


def _check_agreement(shards: ShardSet, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
    if shards.manifest is None:
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


def _check_corpora(train_shards: ShardSet, eval_shards: ShardSet) -> None:
    """Raise InputError where the records of both corpora tell that rows to evaluate on may be trained on, too."""
    train, evaluation = train_shards.manifest, eval_shards.manifest
    if train is None or evaluation is None:
        return
    parts = [record_of_split(part.corpus, part.split) for part in (train, evaluation)]
    if shared := describe_shared_text(*parts):
        raise InputError(
            f"--eval-dataset must hold no text of --train-dataset; {eval_shards.folder} is not of the preparation of "
            f"{train_shards.folder}, and {shared}. Prepare both by one command."
        )
    unknown = {*map(describe_unknown, parts)} - {""}
    if unknown and identity(parts[0]) != identity(parts[1]):
        logger.warning(
            "Whether --eval-dataset shares text with --train-dataset is unknown: a record of an older version does not "
            "tell %s.",
            " or ".join(sorted(unknown)),
        )
