"""One part of the corpus, from its documents to a complete folder: plan, build, describe."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.manifest import (
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    Totals,
    open_shards,
    write_manifest,
)
from tfrecord_prep.partition import PartitionSettings, build_partitions
from tfrecord_prep.plain_text import plain_text_tokenizer_json
from tfrecord_prep.records import decode_feature, read_records
from tfrecord_prep.split_folder import check_folder, clear_folder
from tokenizer_training import storage
from tokenizer_training.command_line import InputError
from tokenizer_training.tokenizer import save_tokenizer, special_ids, tokenizer_sha256, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

LIBRARIES = ("mlm-pretraining", "tokenizers", "transformers", "datasets", "numpy")
SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class SplitPlan:
    """What will be written for one split: `settings` are the fields of its manifest that are known beforehand."""

    folder: str
    settings: dict[str, Any]
    is_complete: bool


def plan_split(
    name: str, config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast", corpus: dict[str, Any]
) -> SplitPlan:
    """Return the plan of a split, after a look at its folder.

    Raises:
        InputError: the folder holds other shards, or damaged ones, and --overwrite is not given.
    """
    folder = storage.join(str(config.output_dir), name)
    settings = {
        "split": name,
        "max_length": config.max_length,
        "chunking": config.chunking,
        "shard_size": config.shard_size,
        "partition_bytes": config.partition_bytes,
        "tokenizer": TokenizerRecord(tokenizer_sha256(tokenizer), vocabulary_size(tokenizer), special_ids(tokenizer)),
        "corpus": corpus,
    }
    return SplitPlan(folder, settings, not config.overwrite and check_folder(folder, settings))


def prepare_split(
    plan: SplitPlan, documents: Iterable[str], tokenizer: "PreTrainedTokenizerFast", num_processes: int
) -> Manifest:
    """Write the folder of a split, the manifest last, and return the manifest.

    Raises:
        InputError: the folder cannot be written, a document is not valid Unicode, there is no text at all.
    """
    with _explained_errors(plan.folder):
        clear_folder(plan.folder)
        save_tokenizer(tokenizer, storage.join(plan.folder, TOKENIZER_FOLDER_NAME))
        settings = _partition_settings(plan, tokenizer)
        shards, totals, id_counts = _build(plan, documents, settings, num_processes)
        if not id_counts.any():
            raise InputError(
                f"A split must hold text; {plan.settings['split']} has {totals.num_documents:,} documents, and none "
                "of them gave a token that the tokenizer knows (see --text-column, --limit, --validation-percent)."
            )
        manifest = Manifest(
            **plan.settings,
            shards=shards,
            totals=totals,
            unigram_entropy_nats=entropy_nats(id_counts),
            versions={library: version(library) for library in LIBRARIES},
        )
        write_manifest(plan.folder, manifest)
    return manifest


def log_first_row(folder: str, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Log the beginning of a split's first row, as it stands in its file, decoded."""
    data = storage.read_bytes(open_shards(folder).paths[0])
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
        tokenizer_json=plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()),
        vocabulary_size=plan.settings["tokenizer"].vocabulary_size,
        special_ids=plan.settings["tokenizer"].special_ids,
        chunking=plan.settings["chunking"],
        max_length=plan.settings["max_length"],
        shard_size=plan.settings["shard_size"],
    )


def _build(
    plan: SplitPlan, documents: Iterable[str], settings: PartitionSettings, num_processes: int
) -> tuple[tuple[ShardRecord, ...], Totals, NDArray[np.int64]]:
    """Build all partitions, with a progress bar, and return their shards and sums."""
    shards: list[ShardRecord] = []
    totals = Totals(0, 0, 0, 0, 0)
    id_counts = np.zeros(settings.vocabulary_size, np.int64)
    start_seconds = time.perf_counter()
    with tqdm(desc=plan.settings["split"], unit=" documents", disable=None) as bar:
        for result in build_partitions(documents, settings, plan.settings["partition_bytes"], num_processes):
            shards += result.shards
            totals = totals + result.totals
            id_counts += result.id_counts
            bar.set_postfix_str(f"{totals.num_tokens / (time.perf_counter() - start_seconds):,.0f} tokens/s", False)
            bar.update(result.totals.num_documents)
    return tuple(shards), totals, id_counts


@contextlib.contextmanager
def _explained_errors(folder: str) -> Iterator[None]:
    """Turn what the file system or the network refuses into one line; the folder then has no manifest."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder} was not completed: {error}. Cure this and run the same command again, or give another "
            "--output-dir."
        ) from error
