"""Prepare one split of the corpus: plan it, process its partitions, show the progress, and write the manifest."""

import contextlib
import dataclasses
import json
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from mlm_common.cli.console import progress_bar
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.corpus import Corpus, Partition
from mlm_common.corpus.identity import Part, describe_shared_text, record_of_split
from mlm_common.corpus.sources import Mixture
from mlm_common.corpus.text_files import ByteRange
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError, RunFailedError
from mlm_common.folder_lock import owner_of
from mlm_common.storage import CloudStorageError, folder_and_name, open_folder
from mlm_common.tokenizer import (
    plain_text_tokenizer_json,
    save_tokenizer,
    special_ids,
    tokenizer_sha256,
    vocabulary_size,
)
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.duplicates import FOLDER_NAME, hashes_name, texts_compared
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
from tfrecord_prep.partition import NumberedPartition, SplitWork
from tfrecord_prep.records import first_row_ids
from tfrecord_prep.split_folder import (
    begin_folder,
    check_folder,
    clear_folder,
    finish_folder,
    partition_sha256,
    read_results,
    recorded_plan,
    sidecar_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

LIBRARIES = ("mlm-pretraining", "tokenizers", "transformers", "datasets", "numpy")
SHOWN_CHARACTERS = 200
SHOWN_COLUMNS = 100
# Settings, and fields of the manifest, that are only used for pairs of segments.
PAIR_SETTINGS = ("sentences_by", "random_share")
# A hundred or more partitions keep all workers busy to the end. Smaller partitions would waste more rows on padding and
# make shards of a few rows. Larger ones would lose more work when a worker dies, and take more memory when documents
# are sent to the workers.
NUM_PARTITIONS = 128
MIN_DEFAULT_BYTES = 1 << 20
MAX_DEFAULT_BYTES = 64 << 20
DEFAULT_BYTES = 4 << 20  # if the size of the corpus is unknown
# The default number of rows per shard, and the longest rows to which it applies. Shards are small, because training
# holds whole shards in memory to shuffle them.
SHARD_ROWS, ROW_LENGTH = 16384, 512

# A function that calls `work_on_partition` on each partition, here or on other machines, and yields the numbers of
# complete partitions.
Engine = Callable[[SplitWork, Iterable[NumberedPartition]], Iterable[int]]


@dataclass(frozen=True)
class SplitPlan:
    """The plan for the shards of one split of a source.

    Attributes:
        source: name of the source; empty if there is only one corpus.
        split_name: name of the split.
        folder: folder of the split.
        hashes_folder: folder for the files of `find_duplicates`.
        fields: the fields of the manifest that are known in advance, as JSON values.
        is_complete: whether the folder is already complete with these settings.
        tokenizer_json: result of `plain_text_tokenizer_json`.
    """

    source: str
    split_name: str
    folder: str
    hashes_folder: str
    fields: dict[str, Any]
    is_complete: bool
    tokenizer_json: str

    @property
    def place(self) -> str:
        """The split's folder, relative to --output-dir."""
        return f"{self.source}/{self.split_name}".lstrip("/")


def plan_mixture(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", mixture: Mixture) -> list[SplitPlan]:
    """Check the folder of each split of each source, and plan the split.

    Raises:
        InputError: raised by `plan_splits` or `check_other_splits`.
    """
    deduplicated = texts_compared(mixture) if config.drop_duplicates else {}
    plans = []
    for source in mixture.corpora:
        source_plans = plan_splits(config, tokenizer, mixture, source, deduplicated)
        check_other_splits(source_plans)
        plans += source_plans
    return plans


def plan_splits(
    config: PrepareConfig,
    tokenizer: "PreTrainedTokenizerFast",
    mixture: Mixture,
    source: str,
    deduplicated: Mapping[tuple[str, str], dict[str, str]],
) -> list[SplitPlan]:
    """Check the folder of each split of a source, and plan the split.

    Args:
        config: settings of the command.
        tokenizer: the tokenizer.
        mixture: all sources.
        source: name of the source.
        deduplicated: result of `texts_compared`; empty if duplicates are kept.

    Raises:
        InputError: a folder contains damaged shards, or shards made with different settings, and --overwrite is not
            given. Also any error that `plain_text_tokenizer_json` raises.
    """
    corpus = mixture.corpora[source]
    tokenizer_json = plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str())
    output, source_prefix = open_folder(str(config.output_dir)), f"{source}/" if source else ""
    before = {} if config.overwrite else recorded_plan(output.path_of(source_prefix + corpus.config.split)) or {}
    shared = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "chunking": config.chunking,
        **({name: getattr(config, name) for name in PAIR_SETTINGS} if config.chunking == PAIRS else {}),
        "shard_size": config.shard_size or before.get("shard_size") or default_shard_size(config.max_length),
        "partition_bytes": config.partition_bytes or before.get("partition_bytes") or default_partition_bytes(corpus),
        **made_with(tokenizer),
    }
    plans = []
    for name in corpus.split_names:
        place = source_prefix + name
        folder, hashes_folder = output.path_of(place), output.path_of(f"{FOLDER_NAME}/{place}")
        values = {"split": name, "corpus": record_of_split(corpus.record, name)} | shared
        values |= {"deduplicated": deduplicated[source, name]} if deduplicated else {}
        fields = json.loads(json.dumps(values))
        is_complete = not config.overwrite and check_folder(folder, fields)
        plans.append(SplitPlan(source, name, folder, hashes_folder, fields, is_complete, tokenizer_json))
    return plans


def made_with(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return the fields `tokenizer` and `versions` of a manifest, which record how the ids were made."""
    record = TokenizerRecord(tokenizer_sha256(tokenizer), vocabulary_size(tokenizer), special_ids(tokenizer))
    return {"tokenizer": dataclasses.asdict(record), "versions": {library: version(library) for library in LIBRARIES}}


def check_other_splits(plans: Sequence[SplitPlan]) -> None:
    """Check that existing splits that this command will not write share no text with the planned splits.

    Raises:
        InputError: an existing split shares text with a planned split, or was made from the same files.
    """
    output, planned = folder_and_name(plans[0].folder)[0], {plan.split_name for plan in plans}
    for name in sorted({CorpusConfig.split, *HELD_OUT_SPLITS} - planned):
        folder = output.path_of(name)
        if (existing := recorded_plan(folder)) is None:
            continue
        for plan in plans:
            parts = Part(existing["corpus"], name), Part(plan.fields["corpus"], plan.split_name)
            if shared := describe_shared_text(*parts):
                raise InputError(
                    f"Splits in the same folder must not share text; {folder} comes from a different preparation, and "
                    f"{shared}. Prepare all splits with one command, choose another --output-dir, or delete {folder}."
                )


def hash_split(plan: SplitPlan, corpus: Corpus, engine: Engine) -> list[str]:
    """Write a file of hashes for each partition, unless an earlier run wrote it; return the paths by partition."""
    names: list[str] = []
    folder = open_folder(plan.hashes_folder)
    existing = folder.list_files()

    def number(index: int, partition: Partition) -> NumberedPartition | None:
        numbered = NumberedPartition(index, partition_sha256(plan.fields, partition), partition)
        names.append(hashes_name(index, numbered.sha256))
        return None if names[-1] in existing else numbered

    work = dataclasses.replace(_work_on(plan, corpus), hashes_folder=plan.hashes_folder)
    with failures_named(plan.folder):
        _work_through(plan, corpus, work, engine, number, f"Hashing {plan.place}")
    return [folder.path_of(name) for name in names]


@contextlib.contextmanager
def failures_named(folder: str) -> Iterator[None]:
    """Convert write failures to a RunFailedError that names the split's folder and says how to continue."""
    try:
        yield
    except (OSError, CloudStorageError) as error:
        raise RunFailedError(
            f"{folder} was not completed: {error}. Its complete partitions are kept. Fix this and run the same command "
            "again: it resumes from there."
        ) from error


def _work_on(plan: SplitPlan, corpus: Corpus) -> SplitWork:
    fields = plan.fields
    return SplitWork(
        corpus.config,
        plan.split_name,
        plan.folder,
        plan.tokenizer_json,
        vocabulary_size=fields["tokenizer"]["vocabulary_size"],
        special_ids=fields["tokenizer"]["special_ids"],
        owner=owner_of(plan.folder),
        **{name: fields[name] for name in ("chunking", "max_length", "shard_size", *PAIR_SETTINGS) if name in fields},
    )


def _work_through(
    plan: SplitPlan,
    corpus: Corpus,
    work: SplitWork,
    engine: Engine,
    prepare: Callable[[int, Partition], NumberedPartition | None],
    title: str,
) -> BadRows:
    """Process the partitions of a split with the engine, and show the progress.

    Args:
        plan: plan of the split.
        corpus: corpus of the split.
        work: everything that the workers need.
        engine: processes partitions.
        prepare: function that takes the number of a partition and the partition, and prepares it for the workers;
            returns None if the partition is already complete.
        title: title of the progress bar.

    Returns:
        The rows that this process could not read. Rows that a worker could not read are in the sidecars.
    """
    bad_rows, partition_bytes = BadRows(), plan.fields["partition_bytes"]
    sizes_bytes: dict[int, int] = {}  # size of byte ranges as stored, and of documents in UTF-8

    def missing() -> Iterator[NumberedPartition]:
        for index, partition in enumerate(corpus.partitions(plan.split_name, partition_bytes, bad_rows)):
            sizes_bytes[index] = sum(
                item.num_bytes if isinstance(item, ByteRange) else len(item.encode()) for item in partition
            )
            if numbered := prepare(index, partition):
                yield numbered
            else:
                bar.update(sizes_bytes.pop(index))

    is_size_known = corpus.has_byte_ranges(plan.split_name, partition_bytes)
    num_bytes = sum(file.num_bytes for file in corpus.files(plan.split_name)) if is_size_known else None
    with progress_bar(title, "B", num_bytes) as bar:
        for index in engine(work, missing()):
            bar.update(sizes_bytes.pop(index))
    return bad_rows


def prepare_split(
    plan: SplitPlan,
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerFast",
    engine: Engine,
    duplicates: Mapping[int, bytes],
) -> None:
    """Write the folder of a split, the manifest last.

    Partitions that an earlier run completed with the same settings and text are kept. If the whole folder is complete,
    only the leftovers of a killed run are deleted.

    Args:
        plan: plan of the split.
        corpus: corpus of the split.
        tokenizer: the tokenizer; it is saved with the shards.
        engine: processes partitions.
        duplicates: result of `find_duplicates` for the split; empty to keep all documents.

    Raises:
        InputError: a document cannot be read, there is no text at all, or a worker was killed.
        RunFailedError: the folder could not be completed.
    """
    if plan.is_complete:
        finish_folder(plan.folder)
        return
    fields, files, flags_folder = plan.fields, open_folder(plan.folder), open_folder(plan.hashes_folder)
    with failures_named(plan.folder):
        complete = begin_folder(plan.folder, fields)
        save_tokenizer(tokenizer, files.path_of(TOKENIZER_FOLDER_NAME))
        sha256: dict[int, str] = {}

        def prepare(index: int, partition: Partition) -> NumberedPartition | None:
            sha256[index] = partition_sha256(fields, partition, duplicates.get(index, b""))
            if complete.get(index) == sha256[index]:
                return None
            if index in complete:
                files.delete_files([sidecar_name(index)])  # before the shards that it names are replaced
            if index not in duplicates:
                return NumberedPartition(index, sha256[index], partition)
            flags_folder.write_bytes(f"{index:05d}", duplicates[index])
            return NumberedPartition(index, sha256[index], partition, flags_folder.path_of(f"{index:05d}"))

        bad_rows = _work_through(plan, corpus, _work_on(plan, corpus), engine, prepare, f"Writing {plan.place}")
        manifest = _sum_up(plan, sha256, bad_rows)
        kept = {shard.name for shard in manifest.shards}
        files.delete_files([name for name in files.list_files() if name.endswith(".tfrecord") and name not in kept])
        write_manifest(plan.folder, manifest)
        finish_folder(plan.folder)


def _sum_up(plan: SplitPlan, sha256: Mapping[int, str], bad_rows: BadRows) -> Manifest:
    """Return a manifest that sums up the results of all partitions, and add their bad rows to `bad_rows`.

    Args:
        plan: plan of the split.
        sha256: `partition_sha256` of each partition, by its number.
        bad_rows: rows that the main process could not read.

    Raises:
        InputError: the split has no text; its folder is cleared.
        RunFailedError: a partition is missing.
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
            f"Only {num_complete:,} of {len(sha256):,} partitions in {plan.folder} are complete. Run the command again."
        )
    if not id_counts.any():
        clear_folder(plan.folder)
        raise InputError(
            f"A split must have text; none of the {totals.num_documents:,} documents of {plan.place} produced a token "
            "that the tokenizer knows"
            + (", or a pair, which needs two sentences or documents" if plan.fields["chunking"] == PAIRS else "")
            + ". Check --text-column, --limit, --validation-percent, --test-percent and --drop-duplicates."
        )
    fields = plan.fields | {"tokenizer": TokenizerRecord(**plan.fields["tokenizer"])}
    entropy = entropy_nats(id_counts)
    return Manifest(**fields, shards=tuple(shards), totals=totals, bad_rows=bad_rows, unigram_entropy_nats=entropy)


def describe_first_row(folder: str, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Read the first row of a split from its shard, and return the start of its text on a few indented lines."""
    input_ids = first_row_ids(open_shards(folder).paths[0]).tolist()
    text = " ".join(tokenizer.decode(input_ids, clean_up_tokenization_spaces=False).split())
    shortened = text[:SHOWN_CHARACTERS] + "…" * (len(text) > SHOWN_CHARACTERS)
    return textwrap.fill(f"first row: {shortened}", SHOWN_COLUMNS, initial_indent="  ", subsequent_indent="    ")


def default_shard_size(max_length: int) -> int:
    """Choose the number of rows per shard so that shards of long rows are no larger than other shards."""
    return max(1, SHARD_ROWS * ROW_LENGTH // max(ROW_LENGTH, max_length))


def default_partition_bytes(corpus: Corpus) -> int:
    """Choose the size of the partitions, given the size of the corpus."""
    num_bytes = sum(file.num_bytes for file in corpus.files(corpus.config.split))
    if not num_bytes or corpus.config.limit:
        return DEFAULT_BYTES
    return min(max(num_bytes // NUM_PARTITIONS, MIN_DEFAULT_BYTES), MAX_DEFAULT_BYTES)
