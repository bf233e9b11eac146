"""One part of the corpus, from its documents to a complete folder: plan, work, describe."""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage import CloudStorageError, open_folder, read_file
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.encoding import plain_text_tokenizer_json
from tfrecord_prep.manifest import (
    FORMAT_VERSION,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    Totals,
    open_shards,
    write_manifest,
)
from tfrecord_prep.partition import PartitionSettings, SplitWork
from tfrecord_prep.records import decode_feature, read_records
from tfrecord_prep.split_folder import (
    PartitionResult,
    begin_folder,
    check_folder,
    clear_folder,
    finish_folder,
    plan_sha256,
    read_results,
)
from tokenizer_training.corpus.byte_ranges import ByteRange
from tokenizer_training.corpus.corpus import Corpus, Partition
from tokenizer_training.tokenizer import save_tokenizer, special_ids, tokenizer_sha256, vocabulary_size

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerFast


logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0


class SplitProgress:
    """Bytes of the corpus done, of `total_bytes` where that is known; rates and estimates are those of this run."""

    def __init__(self, split_name: str, total_bytes: int | None, bar: "tqdm | None") -> None:
        self._split_name = split_name
        self._total_bytes = total_bytes
        self._bar = bar
        self._started_seconds = self._line_seconds = time.monotonic()
        self._num_bytes_before = 0
        self._num_bytes = 0
        self._num_tokens = 0

    def skip(self, num_bytes: int) -> None:
        """Count what an earlier run has done."""
        self._num_bytes_before += num_bytes
        if self._bar is not None:
            self._bar.initial += num_bytes
            self._bar.update(num_bytes)

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """Count what this run has done."""
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._tokens_per_second(), refresh=False)
            self._bar.update(num_bytes)
        elif time.monotonic() - self._line_seconds >= SECONDS_BETWEEN_LINES:
            self._line_seconds = time.monotonic()
            self.log_line()

    def log_line(self) -> None:
        """Log how far the split is."""
        logger.info("%s: %s, %s%s", self._split_name, self._share(), self._tokens_per_second(), self._estimate())

    def _share(self) -> str:
        num_bytes = self._num_bytes_before + self._num_bytes
        if self._total_bytes:
            return f"{100 * num_bytes / self._total_bytes:.0f} % of {self._total_bytes / 1e6:,.1f} MB"
        return f"{num_bytes / 1e6:,.1f} MB"

    def _tokens_per_second(self) -> str:
        return f"{self._num_tokens / self._seconds():,.0f} tokens/s"

    def _estimate(self) -> str:
        num_bytes_left = (self._total_bytes or 0) - self._num_bytes_before - self._num_bytes
        if num_bytes_left <= 0 or not self._num_bytes:
            return ""
        return f", {num_bytes_left / self._num_bytes * self._seconds() / 60:,.1f} minutes left"

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started_seconds, 1e-3)


@contextmanager
def split_progress(split_name: str, total_bytes: int | None) -> Iterator[SplitProgress]:
    """Give the progress of a split, shown from now on until the end."""
    from tqdm import tqdm

    # Without smoothing the rate is a mean, so that what was skipped has no part in it.
    with tqdm(desc=split_name, total=total_bytes, unit="B", unit_scale=True, smoothing=0, disable=None) as bar:
        progress = SplitProgress(split_name, total_bytes, None if bar.disable else bar)
        yield progress
    if bar.disable:
        progress.log_line()


# A hundred partitions and more keep all workers busy to the end. Smaller ones would be padded rows and files of a few
# rows; larger ones would be work lost when a worker dies, and memory where documents are sent to the workers.
NUM_PARTITIONS = 128
MIN_DEFAULT_BYTES = 1 << 20
MAX_DEFAULT_BYTES = 64 << 20
DEFAULT_BYTES = 4 << 20  # where nothing tells how large the corpus is


class WorkList:
    """The numbered partitions of a split without the complete ones, once; `num_partitions` counts all of them."""

    def __init__(
        self, corpus: Corpus, split_name: str, partition_bytes: int, complete: Collection[int], progress: SplitProgress
    ) -> None:
        self._partitions = corpus.partitions(split_name, partition_bytes)
        self._complete = complete
        self._progress = progress
        self._num_bytes: dict[int, int] = {}
        self.num_partitions = 0

    def __iter__(self) -> Iterator[tuple[int, Partition]]:
        for index, partition in enumerate(self._partitions):
            self.num_partitions += 1
            num_bytes = num_partition_bytes(partition)
            if index in self._complete:
                self._progress.skip(num_bytes)
            else:
                self._num_bytes[index] = num_bytes
                yield index, partition

    def finish(self, index: int, num_tokens: int) -> None:
        """Count partition number `index` as complete."""
        self._progress.add(self._num_bytes.pop(index), num_tokens)


def total_bytes(corpus: Corpus, split_name: str, partition_bytes: int) -> int | None:
    """Sum the sizes of the partitions; None where only reading them would tell."""
    if not corpus.has_byte_ranges(split_name, partition_bytes):
        return None
    return sum(file.num_bytes for file in corpus.files(split_name)) or None


def default_partition_bytes(corpus: Corpus) -> int:
    """Choose a size of partitions that fits the size of the corpus."""
    num_bytes = sum(file.num_bytes for file in corpus.files(corpus.config.split))
    if not num_bytes or corpus.config.limit:
        return DEFAULT_BYTES
    return min(max(num_bytes // NUM_PARTITIONS, MIN_DEFAULT_BYTES), MAX_DEFAULT_BYTES)


def num_partition_bytes(partition: Partition) -> int:
    """Measure a partition: its documents in UTF-8, or its byte ranges as stored."""
    return sum(item.num_bytes if isinstance(item, ByteRange) else len(item.encode()) for item in partition)


LIBRARIES = ("mlm-pretraining", "tokenizers", "transformers", "datasets", "numpy")
SHOWN_CHARACTERS = 400

# Works on numbered partitions, each by `work_on_partition`, and gives the results as they come.
Engine = Callable[[SplitWork, Iterable[tuple[int, Partition]]], Iterable[PartitionResult]]


@dataclass(frozen=True)
class SplitPlan:
    """What will be written for one split: `fields` are those of its manifest that are known beforehand, as in JSON."""

    split_name: str
    folder: str
    fields: dict[str, Any]
    is_complete: bool


def plan_splits(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", corpus: Corpus) -> list[SplitPlan]:
    """Return the plan of each split, after a look at its folder.

    Raises:
        InputError: a folder holds other shards, or damaged ones, and --overwrite is not given.
    """
    shared = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "chunking": config.chunking,
        "shard_size": config.shard_size,
        "partition_bytes": config.partition_bytes or default_partition_bytes(corpus),
        "tokenizer": dataclasses.asdict(
            TokenizerRecord(tokenizer_sha256(tokenizer), vocabulary_size(tokenizer), special_ids(tokenizer))
        ),
        "corpus": corpus.description,
        "versions": {library: version(library) for library in LIBRARIES},
    }
    plans = []
    for name in corpus.split_names:
        folder = open_folder(str(config.output_dir)).path_of(name)
        fields = json.loads(json.dumps({"split": name} | shared))
        plans.append(SplitPlan(name, folder, fields, not config.overwrite and check_folder(folder, fields)))
    return plans


def prepare_split(plan: SplitPlan, corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", engine: Engine) -> None:
    """Write the folder of a split, the manifest last; what an earlier run of the same plan has done is kept.

    Raises:
        InputError: a document cannot be read, there is no text at all, or a worker was killed.
        RunFailedError: the folder could not be written to its end.
    """
    with _explained_errors(plan.folder):
        complete = begin_folder(plan.folder, plan.fields)
        save_tokenizer(tokenizer, open_folder(plan.folder).path_of(TOKENIZER_FOLDER_NAME))
        settings = _partition_settings(plan, tokenizer)
        partition_bytes = plan.fields["partition_bytes"]
        with split_progress(plan.split_name, total_bytes(corpus, plan.split_name, partition_bytes)) as progress:
            work_list = WorkList(corpus, plan.split_name, partition_bytes, complete, progress)
            for result in engine(SplitWork(corpus.config, plan.split_name, settings), work_list):
                work_list.finish(result.index, result.totals.num_tokens)
        write_manifest(plan.folder, _sum_up(plan, work_list.num_partitions))
        finish_folder(plan.folder)


def log_first_row(folder: str, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Log the beginning of a split's first row, as it stands in its file, decoded."""
    data = read_file(open_shards(folder).paths[0])
    input_ids = decode_feature(next(read_records(data)), "input_ids").tolist()
    text = tokenizer.decode(input_ids, clean_up_tokenization_spaces=False)
    shortened = text[:SHOWN_CHARACTERS] + "…" * (len(text) > SHOWN_CHARACTERS)
    logger.info("first row of %s: %s … reads: %s", folder, input_ids[:16], shortened)


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the distribution with these counts: the loss of predicting by frequency alone."""
    probabilities = counts[counts > 0] / counts.sum()
    return float((probabilities * np.log(1 / probabilities)).sum())


def _partition_settings(plan: SplitPlan, tokenizer: "PreTrainedTokenizerFast") -> PartitionSettings:
    return PartitionSettings(
        folder=plan.folder,
        plan_sha256=plan_sha256(plan.fields),
        tokenizer_json=plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()),
        vocabulary_size=plan.fields["tokenizer"]["vocabulary_size"],
        special_ids=plan.fields["tokenizer"]["special_ids"],
        chunking=plan.fields["chunking"],
        max_length=plan.fields["max_length"],
        shard_size=plan.fields["shard_size"],
    )


def _sum_up(plan: SplitPlan, num_partitions: int) -> Manifest:
    """Return the manifest of all partitions; where they hold no text at all, the folder is cleared."""
    shards: list[ShardRecord] = []
    totals = Totals(0, 0, 0, 0, 0)
    id_counts = np.zeros(plan.fields["tokenizer"]["vocabulary_size"], np.int64)
    num_complete = 0
    for result in read_results(plan.folder, plan.fields):
        shards += result.shards
        totals += result.totals
        id_counts += result.id_counts
        num_complete += 1
    if num_complete != num_partitions:
        raise RunFailedError(
            f"{plan.folder} has {num_complete:,} complete partitions of {num_partitions:,}: another program changed "
            "the folder meanwhile. Run the same command again."
        )
    if not id_counts.any():
        clear_folder(plan.folder)
        raise InputError(
            f"A split must hold text; {plan.split_name} has {totals.num_documents:,} documents, and none of them gave "
            "a token that the tokenizer knows (see --text-column, --limit, --validation-percent, --test-percent)."
        )
    tokenizer = TokenizerRecord(**plan.fields["tokenizer"])
    entropy = entropy_nats(id_counts)
    known = plan.fields | {"tokenizer": tokenizer}
    return Manifest(**known, shards=tuple(shards), totals=totals, unigram_entropy_nats=entropy)


@contextlib.contextmanager
def _explained_errors(folder: str) -> Iterator[None]:
    """Turn what the file system or the network refuses into one line; the folder then has no manifest."""
    try:
        yield
    except (OSError, CloudStorageError) as error:
        raise RunFailedError(
            f"{folder} was not completed: {error}. What is complete in it stays. Cure this and run the same command "
            "again: it goes on from there."
        ) from error
