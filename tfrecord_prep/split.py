"""Prepare one split of the corpus: plan it, have its partitions worked on, show the progress, write the manifest."""

import dataclasses
import json
import logging
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.corpus import Corpus, Partition
from mlm_common.corpus.identity import record_of_split
from mlm_common.corpus.shared_text import Part, describe_shared_text
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError, RunFailedError
from mlm_common.folder_lock import owner_of
from mlm_common.storage import CloudStorageError, open_folder
from mlm_common.tokenizer import (
    plain_text_tokenizer_json,
    save_tokenizer,
    special_ids,
    tokenizer_sha256,
    vocabulary_size,
)
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.manifest import (
    FORMAT_VERSION,
    PAIRS,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    Totals,
    entropy_nats,
    open_shards,
    write_manifest,
)
from tfrecord_prep.partition import NumberedPartition, PartitionSettings, SplitWork
from tfrecord_prep.records import first_row_ids
from tfrecord_prep.split_folder import (
    CompletePartitions,
    PartitionResult,
    begin_folder,
    check_folder,
    clear_folder,
    finish_folder,
    partition_sha256,
    read_results,
    recorded_plan,
)

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

LIBRARIES = ("mlm-pretraining", "tokenizers", "transformers", "datasets", "numpy")
SHOWN_CHARACTERS = 200
SHOWN_COLUMNS = 100
# Settings and fields of the manifest that only pairs of segments have.
PAIR_SETTINGS = ("sentences_by", "random_share")
# Tolerated differences from the requested fraction of random pairs: where documents end it is higher.
FEWER_RANDOM, MORE_RANDOM = 0.1, 0.3
# A hundred partitions and more keep all workers busy to the end. Smaller ones would be padded rows and files of a few
# rows; larger ones would be work lost when a worker dies, and memory where documents are sent to the workers.
NUM_PARTITIONS = 128
MIN_DEFAULT_BYTES = 1 << 20
MAX_DEFAULT_BYTES = 64 << 20
DEFAULT_BYTES = 4 << 20  # if the size of the corpus is unknown
SECONDS_BETWEEN_LINES = 30.0

# Works on numbered partitions, each by `work_on_partition`, and yields the results as they come.
Engine = Callable[[SplitWork, Iterable[NumberedPartition]], Iterable[PartitionResult]]


@dataclass(frozen=True)
class SplitPlan:
    """What will be written for one split.

    `fields` are the fields of its manifest that are known beforehand, as in JSON; `tokenizer_json` is what
    `plain_text_tokenizer_json` returned.
    """

    split_name: str
    folder: str
    fields: dict[str, Any]
    is_complete: bool
    tokenizer_json: str


def plan_splits(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", corpus: Corpus) -> list[SplitPlan]:
    """Plan each split, after a check of its folder.

    Raises:
        InputError: a folder contains other shards, or damaged ones, and --overwrite is not given; or what
            `plain_text_tokenizer_json` raises.
    """
    tokenizer_json = plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str())
    output = open_folder(str(config.output_dir))
    before = None if config.overwrite else recorded_plan(output.path_of(corpus.config.split))
    shared = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "chunking": config.chunking,
        **({name: getattr(config, name) for name in PAIR_SETTINGS} if config.chunking == PAIRS else {}),
        "shard_size": config.shard_size,
        "partition_bytes": config.partition_bytes
        or (before["partition_bytes"] if before else default_partition_bytes(corpus)),
        "tokenizer": dataclasses.asdict(
            TokenizerRecord(tokenizer_sha256(tokenizer), vocabulary_size(tokenizer), special_ids(tokenizer))
        ),
        "versions": {library: version(library) for library in LIBRARIES},
    }
    plans = []
    for name in corpus.split_names:
        folder = output.path_of(name)
        fields = json.loads(json.dumps({"split": name, "corpus": record_of_split(corpus.record, name)} | shared))
        is_complete = not config.overwrite and check_folder(folder, fields)
        plans.append(SplitPlan(name, folder, fields, is_complete, tokenizer_json))
    return plans


def find_stale_parts(config: PrepareConfig, plans: Sequence[SplitPlan]) -> list[str]:
    """List other folders of splits in the output whose text is in the plans, too, or was made of the same files.

    Raises:
        InputError: there are such folders, and --overwrite is not given.
    """
    output, planned = open_folder(str(config.output_dir)), {plan.split_name for plan in plans}
    stale = []
    for name in {CorpusConfig.split, *HELD_OUT_SPLITS} - planned:
        folder = output.path_of(name)
        existing = recorded_plan(folder)
        if existing is None:
            continue
        parts = [(Part(existing["corpus"], name), Part(plan.fields["corpus"], plan.split_name)) for plan in plans]
        shared = [found for pair in parts if (found := describe_shared_text(*pair))]
        if shared and not config.overwrite:
            raise InputError(
                f"Splits in one folder must not share text; {folder} is not of this preparation, and {shared[0]}. "
                "Prepare all splits with one command, choose another --output-dir, or pass --overwrite to delete it."
            )
        if shared:
            stale.append(folder)
    return sorted(stale)


def prepare_split(plan: SplitPlan, corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", engine: Engine) -> None:
    """Write the folder of a split, the manifest last; complete partitions of an earlier run of the same plan stay.

    In a complete folder only what a killed run left behind is deleted.

    Raises:
        InputError: a document cannot be read, there is no text at all, or a worker was killed.
        RunFailedError: the folder could not be completed.
    """
    if plan.is_complete:
        finish_folder(plan.folder)
        return
    with _explained_errors(plan.folder):
        complete = begin_folder(plan.folder, plan.fields)
        save_tokenizer(tokenizer, open_folder(plan.folder).path_of(TOKENIZER_FOLDER_NAME))
        partition_bytes = plan.fields["partition_bytes"]
        bad_rows = BadRows()  # of what this process reads; those of byte ranges are in the sidecars
        partitions = corpus.partitions(plan.split_name, partition_bytes, bad_rows)
        with split_progress(plan.split_name, total_bytes(corpus, plan.split_name, partition_bytes)) as progress:
            work_list = WorkList(partitions, partial(partition_sha256, plan.fields), complete, progress)
            work = SplitWork(corpus.config, plan.split_name, _partition_settings(plan), owner_of(plan.folder))
            for result in engine(work, work_list):
                work_list.finish(result.index, result.totals.num_tokens)
        complete.delete_others()
        write_manifest(plan.folder, _sum_up(plan, work_list.sha256, bad_rows))
        finish_folder(plan.folder)


def _partition_settings(plan: SplitPlan) -> PartitionSettings:
    return PartitionSettings(
        folder=plan.folder,
        tokenizer_json=plan.tokenizer_json,
        vocabulary_size=plan.fields["tokenizer"]["vocabulary_size"],
        special_ids=plan.fields["tokenizer"]["special_ids"],
        chunking=plan.fields["chunking"],
        max_length=plan.fields["max_length"],
        shard_size=plan.fields["shard_size"],
        **({name: plan.fields[name] for name in PAIR_SETTINGS} if plan.fields["chunking"] == PAIRS else {}),
    )


def _sum_up(plan: SplitPlan, sha256: Mapping[int, str], bad_rows: BadRows) -> Manifest:
    """Sum up all partitions, whose hashes are `sha256`, for the manifest; add their bad rows to `bad_rows`.

    Without any text the folder is cleared, and an InputError raised.
    """
    shards: list[ShardRecord] = []
    totals = Totals(0, 0, 0, 0, 0)
    id_counts = np.zeros(plan.fields["tokenizer"]["vocabulary_size"], np.int64)
    num_complete = 0
    for result in read_results(plan.folder):
        if result.sha256 != sha256.get(result.index):
            continue
        bad_rows.add(result.bad_rows.num_rows, result.bad_rows.listed)
        shards += result.shards
        totals += result.totals
        id_counts += result.id_counts
        num_complete += 1
    if num_complete != len(sha256):
        raise RunFailedError(
            f"{plan.folder} has {num_complete:,} complete partitions of {len(sha256):,}: another program changed "
            "the folder meanwhile. Run the same command again."
        )
    if not id_counts.any():
        clear_folder(plan.folder)
        raise InputError(
            f"A split must hold text; {plan.split_name} has {totals.num_documents:,} documents, and none of them gave "
            "a token that the tokenizer knows (see --text-column, --limit, --validation-percent, --test-percent)"
            + (", or a pair, which takes two sentences." if plan.fields["chunking"] == PAIRS else ".")
        )
    if plan.fields["chunking"] == PAIRS:
        _warn_of_random_share(plan, totals)
    known = plan.fields | {"tokenizer": TokenizerRecord(**plan.fields["tokenizer"])}
    entropy = entropy_nats(id_counts)
    return Manifest(**known, shards=tuple(shards), totals=totals, bad_rows=bad_rows, unigram_entropy_nats=entropy)


def _warn_of_random_share(plan: SplitPlan, totals: Totals) -> None:
    share, asked = totals.num_random_pairs / totals.num_rows, plan.fields["random_share"]
    if share < asked - FEWER_RANDOM:
        reason = "a random segment is of another document of its partition, and many have none: --partition-bytes"
    elif share > asked + MORE_RANDOM:
        reason = "one sentence goes with a random segment only, and many documents, or rows, are one: --sample-by"
    else:
        return
    numbers = (plan.folder, 100 * share, 100 * asked)
    logger.warning("%s: %.0f %% of the pairs are random, where %.0f %% should be: %s.", *numbers, reason)


@contextmanager
def _explained_errors(folder: str) -> Iterator[None]:
    """Explain errors of the file system or the network in one line; the folder then has no manifest."""
    try:
        yield
    except (OSError, CloudStorageError) as error:
        raise RunFailedError(
            f"{folder} was not completed: {error}. Its complete partitions stay. Fix this and run the same command "
            "again: it resumes from there."
        ) from error


def describe_first_row(folder: str, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Decode the start of a split's first row, read from its shard, on a few indented lines."""
    input_ids = first_row_ids(open_shards(folder).paths[0]).tolist()
    text = " ".join(tokenizer.decode(input_ids, clean_up_tokenization_spaces=False).split())
    shortened = text[:SHOWN_CHARACTERS] + "…" * (len(text) > SHOWN_CHARACTERS)
    return textwrap.fill(f"first row: {shortened}", SHOWN_COLUMNS, initial_indent="  ", subsequent_indent="    ")


def default_partition_bytes(corpus: Corpus) -> int:
    """Choose a size of partitions by the size of the corpus."""
    num_bytes = sum(file.num_bytes for file in corpus.files(corpus.config.split))
    if not num_bytes or corpus.config.limit:
        return DEFAULT_BYTES
    return min(max(num_bytes // NUM_PARTITIONS, MIN_DEFAULT_BYTES), MAX_DEFAULT_BYTES)


class WorkList:
    """Iterates once over the numbered partitions of a split that are not complete; `sha256` has all hashes."""

    def __init__(
        self,
        partitions: Iterable[Partition],
        hash_of: Callable[[Partition], str],
        complete: CompletePartitions,
        progress: "SplitProgress",
    ) -> None:
        self._partitions = partitions
        self._hash_of = hash_of
        self._complete = complete
        self._progress = progress
        self._num_bytes: dict[int, int] = {}
        self.sha256: dict[int, str] = {}

    def __iter__(self) -> Iterator[NumberedPartition]:
        for index, partition in enumerate(self._partitions):
            self.sha256[index] = sha256 = self._hash_of(partition)
            sizes = (item.num_bytes if isinstance(item, ByteRange) else len(item.encode()) for item in partition)
            num_bytes = sum(sizes)  # as stored, or of documents in UTF-8
            if self._complete.keep(index, sha256):
                self._progress.skip(num_bytes)
            else:
                self._num_bytes[index] = num_bytes
                yield NumberedPartition(index, sha256, partition)

    def finish(self, index: int, num_tokens: int) -> None:
        """Count partition number `index` as complete."""
        self._progress.add(self._num_bytes.pop(index), num_tokens)


def total_bytes(corpus: Corpus, split_name: str, partition_bytes: int) -> int | None:
    """Sum the sizes of the partitions; None if they are unknown before they are read."""
    if not corpus.has_byte_ranges(split_name, partition_bytes):
        return None
    return sum(file.num_bytes for file in corpus.files(split_name)) or None


@contextmanager
def split_progress(split_name: str, total_bytes: int | None) -> Iterator["SplitProgress"]:
    """Show the progress of a split: a bar on a terminal, else lines in the log."""
    from tqdm import tqdm

    # Without smoothing the rate is a mean, which leaves out what was skipped.
    with tqdm(desc=split_name, total=total_bytes, unit="B", unit_scale=True, smoothing=0, disable=None) as bar:
        progress = SplitProgress(split_name, total_bytes, None if bar.disable else bar)
        yield progress
    if bar.disable:
        progress.log_line()


class SplitProgress:
    """The bytes of the corpus that are done; rates and estimates are those of this run."""

    def __init__(self, split_name: str, total_bytes: int | None, bar: "tqdm | None") -> None:
        self._split_name = split_name
        self._total_bytes = total_bytes
        self._bar = bar
        self._started_seconds = self._line_seconds = time.monotonic()
        self._num_bytes_before = 0
        self._num_bytes = 0
        self._num_tokens = 0

    def skip(self, num_bytes: int) -> None:
        """Count what an earlier run did."""
        self._num_bytes_before += num_bytes
        if self._bar is not None:
            self._bar.initial += num_bytes
            self._bar.update(num_bytes)

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """Count what this run did."""
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._tokens_per_second(), refresh=False)
            self._bar.update(num_bytes)
        elif time.monotonic() - self._line_seconds >= SECONDS_BETWEEN_LINES:
            self._line_seconds = time.monotonic()
            self.log_line()

    def log_line(self) -> None:
        num_bytes = self._num_bytes_before + self._num_bytes
        done, estimate = f"{num_bytes / 1e6:,.1f} MB", ""
        if self._total_bytes:
            done = f"{100 * num_bytes / self._total_bytes:.0f} % of {self._total_bytes / 1e6:,.1f} MB"
            if num_bytes < self._total_bytes and self._num_bytes:
                seconds_left = (self._total_bytes - num_bytes) / self._num_bytes * self._seconds()
                estimate = f", {seconds_left / 60:,.1f} minutes left"
        logger.info("%s: %s, %s%s", self._split_name, done, self._tokens_per_second(), estimate)

    def _tokens_per_second(self) -> str:
        return f"{self._num_tokens / self._seconds():,.0f} tokens/s"

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started_seconds, 1e-3)
