"""One split of the corpus, from its documents to a complete folder: plan it, have it worked on, sum it up."""

import contextlib
import dataclasses
import json
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from mlm_common.corpus.bad_rows import BadRows
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.corpus import Corpus
from mlm_common.corpus.record import record_of_split
from mlm_common.corpus.shared_text import Part, describe_shared_text
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
from tfrecord_prep.chunking import PAIRS
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.manifest import (
    FORMAT_VERSION,
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
    PartitionResult,
    begin_folder,
    check_folder,
    clear_folder,
    corpus_of_folder,
    finish_folder,
    partition_bytes_of,
    partition_sha256,
    read_results,
)
from tfrecord_prep.work_list import WorkList, default_partition_bytes, split_progress, total_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

LIBRARIES = ("mlm-pretraining", "tokenizers", "transformers", "datasets", "numpy")
SHOWN_CHARACTERS = 200
SHOWN_COLUMNS = 100
# Settings and fields of the manifest that pairs of segments have, and no other rows.
PAIR_SETTINGS = ("sentences_by", "random_share")
# By so much the share of random pairs may be below what is asked for, or above: where documents end it is.
FEWER_RANDOM, MORE_RANDOM = 0.1, 0.3

# Works on numbered partitions, each by `work_on_partition`, and yields the results as they come.
Engine = Callable[[SplitWork, Iterable[NumberedPartition]], Iterable[PartitionResult]]


@dataclass(frozen=True)
class SplitPlan:
    """What will be written for one split.

    `fields` are those of its manifest that are known beforehand, as in JSON; `tokenizer_json` is that of the tokenizer
    whose special tokens no text can produce.
    """

    split_name: str
    folder: str
    fields: dict[str, Any]
    is_complete: bool
    tokenizer_json: str


def plan_splits(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", corpus: Corpus) -> list[SplitPlan]:
    """Plan each split, after a look at its folder.

    Raises:
        InputError: a folder holds other shards, or damaged ones, and --overwrite is not given; or what
            `plain_text_tokenizer_json` raises.
    """
    tokenizer_json = plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str())
    main_folder = open_folder(str(config.output_dir)).path_of(corpus.config.split)
    before = None if config.overwrite else partition_bytes_of(main_folder)
    shared = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "chunking": config.chunking,
        **({name: getattr(config, name) for name in PAIR_SETTINGS} if config.chunking == PAIRS else {}),
        "shard_size": config.shard_size,
        "partition_bytes": config.partition_bytes or before or default_partition_bytes(corpus),
        "tokenizer": dataclasses.asdict(
            TokenizerRecord(tokenizer_sha256(tokenizer), vocabulary_size(tokenizer), special_ids(tokenizer))
        ),
        "versions": {library: version(library) for library in LIBRARIES},
    }
    plans = []
    for name in corpus.split_names:
        folder = open_folder(str(config.output_dir)).path_of(name)
        fields = json.loads(json.dumps({"split": name, "corpus": record_of_split(corpus.record, name)} | shared))
        is_complete = not config.overwrite and check_folder(folder, fields)
        plans.append(SplitPlan(name, folder, fields, is_complete, tokenizer_json))
    return plans


def find_stale_parts(config: PrepareConfig, plans: Sequence[SplitPlan]) -> list[str]:
    """List the folders beside those of the plans that hold text of theirs, or of the same files in another state.

    Raises:
        InputError: there are such folders, and --overwrite is not given.
    """
    output, planned = open_folder(str(config.output_dir)), {plan.split_name for plan in plans}
    stale = []
    for name in {CorpusConfig.split, *HELD_OUT_SPLITS} - planned:
        folder = output.path_of(name)
        corpus = corpus_of_folder(folder)
        if corpus is None:
            continue
        parts = [(Part(corpus, name), Part(plan.fields["corpus"], plan.split_name)) for plan in plans]
        shared = [found for pair in parts if (found := describe_shared_text(*pair))]
        if shared and not config.overwrite:
            raise InputError(
                f"Parts that stand together must not share text; {folder} is not of this preparation, and {shared[0]}. "
                "Prepare all of them by one command, give another --output-dir, or --overwrite to delete it."
            )
        stale += [folder] * bool(shared)
    return sorted(stale)


def prepare_split(plan: SplitPlan, corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", engine: Engine) -> None:
    """Write the folder of a split, the manifest last; what an earlier run of the same plan has done is kept.

    Of a complete folder only what a killed end has left behind is deleted.

    Raises:
        InputError: a document cannot be read, there is no text at all, or a worker was killed.
        RunFailedError: the folder could not be written to its end.
    """
    if plan.is_complete:
        finish_folder(plan.folder)
        return
    with _explained_errors(plan.folder):
        complete = begin_folder(plan.folder, plan.fields)
        save_tokenizer(tokenizer, open_folder(plan.folder).path_of(TOKENIZER_FOLDER_NAME))
        settings = _partition_settings(plan)
        partition_bytes = plan.fields["partition_bytes"]
        bad_rows = BadRows()  # of what this process reads; those of byte ranges are in the sidecars
        partitions = corpus.partitions(plan.split_name, partition_bytes, bad_rows)
        with split_progress(plan.split_name, total_bytes(corpus, plan.split_name, partition_bytes)) as progress:
            work_list = WorkList(partitions, partial(partition_sha256, plan.fields), complete, progress)
            work = SplitWork(corpus.config, plan.split_name, settings, owner_of(plan.folder))
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
    """Sum up all partitions in the manifest; where they hold no text at all, the folder is cleared.

    Args:
        plan: of the split.
        sha256: of the partitions, by number.
        bad_rows: to which those of the partitions are added.
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


@contextlib.contextmanager
def _explained_errors(folder: str) -> Iterator[None]:
    """Turn what the file system or the network refuses into one line; the folder then has no manifest."""
    try:
        yield
    except (OSError, CloudStorageError) as error:
        raise RunFailedError(
            f"{folder} was not completed: {error}. What is complete in it stays. Cure this and run the same command "
            "again: it resumes from there."
        ) from error


def describe_first_row(folder: str, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Decode the start of a split's first row, as it is in its file, on a few indented lines."""
    input_ids = first_row_ids(open_shards(folder).paths[0]).tolist()
    text = " ".join(tokenizer.decode(input_ids, clean_up_tokenization_spaces=False).split())
    shortened = text[:SHOWN_CHARACTERS] + "…" * (len(text) > SHOWN_CHARACTERS)
    return textwrap.fill(f"first row: {shortened}", SHOWN_COLUMNS, initial_indent="  ", subsequent_indent="    ")
