"""Read all shards of a preparation again and hold them against their manifests; nothing else is needed for it."""

import glob
from collections.abc import Iterator
from functools import partial

import numpy as np

from tfrecord_prep.manifest import MANIFEST_NAME, PLAN_NAME, Manifest, open_shards
from tfrecord_prep.shard_checks import ShardToCheck, check_shard
from tfrecord_prep.split import entropy_nats
from tokenizer_training import storage
from tokenizer_training.command_line import InputError, RunFailedError
from tokenizer_training.progress import progress_bar
from tokenizer_training.stored_files import find_stored_files
from tokenizer_training.tokenizer import load_tokenizer, tokenizer_sha256
from tokenizer_training.worker_pool import map_in_order


def verify_folder(output_dir: str, num_processes: int) -> str:
    """Return what was checked in the folders of all splits, when all of it was right.

    Raises:
        InputError: there is no split.
        RunFailedError: the first difference; says in which file and row.
    """
    return "\n".join([verify_split(folder, num_processes) for folder in split_folders(output_dir)])


def split_folders(output_dir: str) -> list[str]:
    """Return the folders in `output_dir` that hold a split, or itself where it is one, complete or not."""
    if {MANIFEST_NAME, PLAN_NAME} & storage.list_files(output_dir).keys():
        return [output_dir]
    pattern = glob.escape(output_dir.rstrip("/"))
    found = [file.name for name in (MANIFEST_NAME, PLAN_NAME) for file in find_stored_files(f"{pattern}/*/{name}")]
    if not found:
        raise InputError(f"--verify needs the --output-dir of a preparation; {output_dir} has no */{MANIFEST_NAME}.")
    return sorted({name.rpartition("/")[0] for name in found})


def verify_split(folder: str, num_processes: int) -> str:
    """Return what was checked in the folder of one split, when all of it was right.

    Raises:
        RunFailedError: the first difference; says in which file and row.
    """
    try:
        shards = open_shards(folder)
        tokenizer = load_tokenizer(storage.join(folder, "tokenizer"))
    except InputError as error:
        raise RunFailedError(str(error)) from error
    manifest = shards.manifest
    if manifest is None:
        raise RunFailedError(f"{folder} has no {MANIFEST_NAME} to hold its shards against.")
    if tokenizer_sha256(tokenizer) != manifest.tokenizer.sha256:
        raise RunFailedError(f"{folder}/tokenizer is not the tokenizer of the manifest.")
    id_counts = np.zeros(manifest.tokenizer.vocabulary_size, np.int64)
    check = partial(check_shard, folder, manifest)
    with progress_bar(f"Verifying {folder}", " shards", len(manifest.shards)) as bar:
        for counts in map_in_order(check, _shards_to_check(manifest), num_processes, "Give fewer --num-workers."):
            id_counts += counts
            bar.update()
    _check_totals(folder, manifest, id_counts)
    return (
        f"{folder}: right. Checked {len(manifest.shards):,} shards, {manifest.totals.num_rows:,} rows, "
        f"{manifest.totals.num_tokens:,} tokens: checksums of files and records, counts, ids, framing, padding, sums, "
        "and the tokenizer's hash."
    )


def _shards_to_check(manifest: Manifest) -> Iterator[ShardToCheck]:
    partitions = [None, *(shard.name.split("-")[1] for shard in manifest.shards), None]
    for number, shard in enumerate(manifest.shards, 1):
        before, own, after = partitions[number - 1 : number + 2]
        yield ShardToCheck(shard, is_first=own != before, is_last=own != after)


def _check_totals(folder: str, manifest: Manifest, id_counts: np.ndarray) -> None:
    special_ids = manifest.tokenizer.special_ids
    num_padding = int(id_counts[special_ids["pad"]])
    text_counts = id_counts.copy()
    text_counts[list(special_ids.values())] = 0
    found = {
        "num_rows": int(id_counts.sum()) // manifest.max_length,
        "num_tokens": int(id_counts.sum()) - num_padding,
        "num_padding_tokens": num_padding,
    }
    for name, value in found.items():
        if getattr(manifest.totals, name) != value:
            stated = getattr(manifest.totals, name)
            raise RunFailedError(f"{folder}/{MANIFEST_NAME} has {name} {stated:,}; the shards have {value:,}.")
    entropy = entropy_nats(text_counts)
    if not np.isclose(manifest.unigram_entropy_nats, entropy, rtol=1e-12):
        stated = manifest.unigram_entropy_nats
        raise RunFailedError(f"{folder}/{MANIFEST_NAME} has unigram_entropy_nats {stated}; the shards have {entropy}.")
