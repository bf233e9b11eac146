"""Read all shards of a preparation again and compare them with their manifests.

Only the output folder is needed, not the corpus.
"""

import dataclasses
import glob
from functools import partial

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlm_common.cli.console import counted, progress_bar
from mlm_common.errors import InputError, RunFailedError
from mlm_common.mixture import MIXTURE_NAME, read_mixture
from mlm_common.storage import open_folder
from mlm_common.storage.reading import find_stored_files
from mlm_common.tokenizer import (
    WORD_STARTS_FILE,
    load_tokenizer,
    load_word_starts,
    tokenizer_sha256,
    word_starts,
)
from mlm_common.workers import map_in_order
from tfrecord_prep.manifest import (
    MANIFEST_NAME,
    PAIRS,
    PLAN_NAME,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    entropy_nats,
    open_shards,
)
from tfrecord_prep.records import LABEL_KEY, decode_rows, read_records


def split_folders(output_dir: str) -> list[str]:
    """Find the folders of splits in `output_dir`, complete or not. `output_dir` may itself be the folder of a split.

    Raises:
        InputError: there is no such folder.
        RunFailedError: the folders belong to several sources but there is no `mixture.json`, or `mixture.json` lists a
            missing folder.
    """
    if {MANIFEST_NAME, PLAN_NAME} & open_folder(output_dir).list_files().keys():
        return [output_dir]
    pattern = glob.escape(output_dir.rstrip("/"))
    names = [f"{depth}/{name}" for depth in ("*", "*/*") for name in (MANIFEST_NAME, PLAN_NAME)]
    files = [file.name for name in names for file in find_stored_files(f"{pattern}/{name}")]
    folders = sorted({name.rpartition("/")[0] for name in files})
    mixture = read_mixture(output_dir)
    if mixture is None and any(folder.removeprefix(output_dir).strip("/").count("/") for folder in folders):
        raise RunFailedError(
            f"{output_dir} has no {MIXTURE_NAME}, which the preparation of several sources writes last. Run the "
            "preparation again, or pass the folder of one source."
        )
    listed = [folder for source in (mixture or {}).values() for folder in (source.train, source.validation) if folder]
    if missing := [folder for folder in listed if open_folder(output_dir).path_of(folder) not in folders]:
        raise RunFailedError(f"{output_dir} has no {missing[0]}, which {MIXTURE_NAME} lists.")
    if not files:
        raise InputError(f"--verify needs the --output-dir of a preparation; {output_dir} has no */{MANIFEST_NAME}.")
    return folders


def verify_split(folder: str, num_processes: int) -> str:
    """Check the folder of one split, and describe the result in one line.

    Raises:
        RunFailedError: something differs from the manifest; the message names the first difference.
    """
    tokenizer_folder = open_folder(folder).path_of(TOKENIZER_FOLDER_NAME)
    try:
        shards = open_shards(folder)
        tokenizer = load_tokenizer(tokenizer_folder)
        saved_starts = load_word_starts(tokenizer_folder)
    except InputError as error:
        raise RunFailedError(str(error)) from error
    manifest = shards.manifest
    if manifest is None:
        raise RunFailedError(f"{folder} has no {MANIFEST_NAME} to compare its shards with.")
    if tokenizer_sha256(tokenizer) != manifest.tokenizer.sha256:
        raise RunFailedError(f"{tokenizer_folder} is not the tokenizer of the manifest.")
    starts = word_starts(tokenizer)
    if saved_starts is not None and (starts is None or not np.array_equal(saved_starts, starts)):
        raise RunFailedError(f"{tokenizer_folder}/{WORD_STARTS_FILE} does not fit the tokenizer. Delete this file.")
    id_counts, num_random_pairs = np.zeros(manifest.tokenizer.vocabulary_size, np.int64), 0
    without_lists = dataclasses.replace(manifest, shards=(), corpus={})  # small, because each task gets a copy
    check = partial(check_shard, folder, without_lists)
    with progress_bar(f"Verifying {folder}", " shards", len(manifest.shards)) as bar:
        for counts, num_random in map_in_order(check, manifest.shards, num_processes, "Use fewer --num-workers."):
            id_counts += counts
            num_random_pairs += num_random
            bar.update()
    _check_totals(folder, manifest, id_counts, num_random_pairs)
    bad_rows = manifest.bad_rows
    skipped = f" Skipped rows of the corpus that cannot be read: {bad_rows.describe()}." if bad_rows.num_rows else ""
    return (
        f"{folder}: correct. Checked {counted(len(manifest.shards), 'shard')}, "
        f"{manifest.totals.num_rows:,} rows, {manifest.totals.num_tokens:,} tokens: checksums of files and records, "
        "counts, ids, padding, sums, the tokenizer's hash and the words' starts." + skipped
    )


def _check_totals(folder: str, manifest: Manifest, id_counts: NDArray[np.int64], num_random_pairs: int) -> None:
    special_ids = manifest.tokenizer.special_ids
    num_padding = int(id_counts[special_ids["pad"]])
    text_counts = id_counts.copy()
    text_counts[list(special_ids.values())] = 0
    actual_totals = {
        "num_rows": int(id_counts.sum()) // manifest.max_length,
        "num_tokens": int(id_counts.sum()) - num_padding,
        "num_padding_tokens": num_padding,
        "num_random_pairs": num_random_pairs,
    }
    for name, value in actual_totals.items():
        recorded = getattr(manifest.totals, name)
        if recorded != value:
            raise RunFailedError(f"{folder}/{MANIFEST_NAME} has {name} {recorded:,}; the shards have {value:,}.")
    entropy, recorded = entropy_nats(text_counts), manifest.unigram_entropy_nats
    if not np.isclose(recorded, entropy, rtol=1e-12):
        raise RunFailedError(
            f"{folder}/{MANIFEST_NAME} has unigram_entropy_nats {recorded}; the shards have {entropy}."
        )


def check_shard(folder: str, manifest: Manifest, shard: ShardRecord) -> tuple[NDArray[np.int64], int]:
    """Check a shard against the manifest.

    Returns:
        The count of each id in the shard, including padding, (vocabulary_size,), and the number of random pairs.

    Raises:
        RunFailedError: the shard is damaged or differs from the manifest. The message names the first difference, with
            its file and row (counted from 0).
    """
    files = open_folder(folder)
    path, data = files.path_of(shard.name), files.read_bytes(shard.name)
    max_length, tokenizer = manifest.max_length, manifest.tokenizer
    size, special_ids = tokenizer.vocabulary_size, tokenizer.special_ids
    examples: list[bytes] = []
    try:
        for example in read_records(data):
            examples.append(example)
    except ValueError as error:
        raise RunFailedError(f"{path}, row {len(examples)}: {error}.") from error
    try:
        input_ids = decode_rows(examples, "input_ids", max_length)  # (num_rows, max_length)
        mask = decode_rows(examples, "attention_mask", max_length)
        labels = decode_rows(examples if manifest.chunking == PAIRS else [], LABEL_KEY, 1)[:, 0]
    except ValueError as error:
        raise RunFailedError(f"{path}: {error}.") from error
    if len(input_ids) != shard.num_rows:
        raise RunFailedError(f"{path} has {len(input_ids):,} rows, but the manifest says {shard.num_rows:,}.")
    num_tokens = mask.sum(axis=1)
    is_token = np.arange(max_length) < num_tokens[:, None]
    problems = {
        "the attention mask is not ones, then zeros": mask != is_token,
        "the row is empty": num_tokens == 0,
        f"{LABEL_KEY} is neither 0 nor 1": (labels < 0) | (labels > 1),
        f"an id is outside the vocabulary of {size:,} tokens": (input_ids < 0) | (input_ids >= size),
        "padding does not match the zeros of the attention mask": (input_ids == special_ids["pad"]) == is_token,
        "the text contains the mask token": input_ids == special_ids["mask"],
    }
    for problem, is_bad in problems.items():
        if is_bad.any():
            raise RunFailedError(f"{path}, row {int(np.argwhere(is_bad)[0, 0]):,}: {problem}.")
    if num_tokens.sum() != shard.num_tokens:
        raise RunFailedError(f"{path} has {num_tokens.sum():,} tokens, but the manifest says {shard.num_tokens:,}.")
    crc32c = f"{google_crc32c.value(data):08x}"
    if crc32c != shard.crc32c:
        raise RunFailedError(f"{path} has the CRC32C {crc32c}, but the manifest says {shard.crc32c}.")
    return np.bincount(input_ids.ravel(), minlength=size), int(labels.sum())
