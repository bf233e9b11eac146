"""Prepare one split of the corpus: plan it, have its partitions worked on, show the progress, write the manifest."""

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
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.corpus import Corpus
from mlm_common.corpus.identity import Part, describe_shared_text, record_of_split
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
# Settings and fields of the manifest that only pairs of segments have.
PAIR_SETTINGS = ("sentences_by", "random_share")
# A hundred partitions and more keep all workers busy to the end. Smaller ones would be padded rows and files of a few
# rows; larger ones would be work lost when a worker dies, and memory where documents are sent to the workers.
NUM_PARTITIONS = 128
MIN_DEFAULT_BYTES = 1 << 20
MAX_DEFAULT_BYTES = 64 << 20
DEFAULT_BYTES = 4 << 20  # if the size of the corpus is unknown

# Works on numbered partitions, each by `work_on_partition`, and yields the number of each that is complete.
Engine = Callable[[SplitWork, Iterable[NumberedPartition]], Iterable[int]]


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


def check_other_splits(config: PrepareConfig, plans: Sequence[SplitPlan]) -> None:
    """Check that no other folder of a split in the output has text that is in the plans, too.

    Raises:
        InputError: one has, or was made of the same files.
    """
    output, planned = open_folder(str(config.output_dir)), {plan.split_name for plan in plans}
    for name in sorted({CorpusConfig.split, *HELD_OUT_SPLITS} - planned):
        folder = output.path_of(name)
        if (existing := recorded_plan(folder)) is None:
            continue
        for plan in plans:
            parts = Part(existing["corpus"], name), Part(plan.fields["corpus"], plan.split_name)
            if shared := describe_shared_text(*parts):
                raise InputError(
                    f"Splits in one folder must not share text; {folder} is not of this preparation, and {shared}. "
                    "Prepare all splits with one command, choose another --output-dir, or delete that folder."
                )


def prepare_split(plan: SplitPlan, corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", engine: Engine) -> None:
    """Write the folder of a split, the manifest last; complete partitions of an earlier run stay, if they are right.

    In a complete folder only what a killed run left behind is deleted.

    Raises:
        InputError: a document cannot be read, there is no text at all, or a worker was killed.
        RunFailedError: the folder could not be completed.
    """
    if plan.is_complete:
        finish_folder(plan.folder)
        return
    fields, files = plan.fields, open_folder(plan.folder)
    work = SplitWork(
        corpus.config,
        plan.split_name,
        plan.folder,
        plan.tokenizer_json,
        vocabulary_size=fields["tokenizer"]["vocabulary_size"],
        special_ids=fields["tokenizer"]["special_ids"],
        owner=owner_of(plan.folder),
        **{name: fields[name] for name in ("chunking", "max_length", "shard_size", *PAIR_SETTINGS) if name in fields},
    )
    try:
        complete = begin_folder(plan.folder, fields)
        save_tokenizer(tokenizer, files.path_of(TOKENIZER_FOLDER_NAME))
        bad_rows = BadRows()  # of what this process reads; those of byte ranges are in the sidecars
        partitions = corpus.partitions(plan.split_name, fields["partition_bytes"], bad_rows)
        sha256: dict[int, str] = {}
        sizes_bytes: dict[int, int] = {}  # as stored, or of documents in UTF-8

        def missing() -> Iterator[NumberedPartition]:
            for index, partition in enumerate(partitions):
                sha256[index] = partition_sha256(fields, partition)
                sizes_bytes[index] = sum(
                    item.num_bytes if isinstance(item, ByteRange) else len(item.encode()) for item in partition
                )
                if complete.get(index) == sha256[index]:
                    bar.update(sizes_bytes.pop(index))
                    continue
                if index in complete:
                    files.delete_files([sidecar_name(index)])  # before the shards that it names are replaced
                yield NumberedPartition(index, sha256[index], partition)

        is_size_known = corpus.has_byte_ranges(plan.split_name, fields["partition_bytes"])
        num_bytes = sum(file.num_bytes for file in corpus.files(plan.split_name)) if is_size_known else None
        with progress_bar(f"Writing {plan.split_name}", "B", num_bytes) as bar:
            for index in engine(work, missing()):
                bar.update(sizes_bytes.pop(index))
        manifest = _sum_up(plan, sha256, bad_rows)
        named = {shard.name for shard in manifest.shards}
        files.delete_files([name for name in files.list_files() if name.endswith(".tfrecord") and name not in named])
        write_manifest(plan.folder, manifest)
        finish_folder(plan.folder)
    except (OSError, CloudStorageError) as error:
        raise RunFailedError(
            f"{plan.folder} was not completed: {error}. Its complete partitions stay. Fix this and run the same "
            "command again: it resumes from there."
        ) from error


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
            f"{plan.folder} has only {num_complete:,} complete partitions of {len(sha256):,}. Run the command again."
        )
    if not id_counts.any():
        clear_folder(plan.folder)
        raise InputError(
            f"A split must hold text; {plan.split_name} has {totals.num_documents:,} documents, and none of them gave "
            "a token that the tokenizer knows (see --text-column, --limit, --validation-percent, --test-percent)"
            + (", or a pair, which takes two sentences." if plan.fields["chunking"] == PAIRS else ".")
        )
    known = plan.fields | {"tokenizer": TokenizerRecord(**plan.fields["tokenizer"])}
    entropy = entropy_nats(id_counts)
    return Manifest(**known, shards=tuple(shards), totals=totals, bad_rows=bad_rows, unigram_entropy_nats=entropy)


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
