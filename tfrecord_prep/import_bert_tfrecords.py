"""Import TFRecord files of BERT's create_pretraining_data.py, whose tokens are masked, as shards of segment pairs.

The files are Google's, NVIDIA's or Model Garden's: input_ids, input_mask, segment_ids, masked_lm_positions,
masked_lm_ids and next_sentence_labels. The masked tokens are put back, since run_mlm.py masks other ones in each epoch.
Each file is read twice: checked, then written. Stopped at any time, the same command continues where it was.
"""

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
import numpy as np
from numpy.typing import NDArray

from mlm_common.cli.console import folder_beside, next_step, progress_bar
from mlm_common.cli.settings import Bounded, flag, require
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.identity import file_record
from mlm_common.corpus.text_files import absolute_pattern, find_files
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from mlm_common.folder_lock import locked_folder
from mlm_common.storage import open_folder
from mlm_common.storage.reading import StoredFile
from mlm_common.tokenizer import load_tokenizer, save_tokenizer
from mlm_common.workers import map_in_order, num_cores
from tfrecord_prep.chunking import Rows
from tfrecord_prep.duplicates import HASH_BYTES, are_seen
from tfrecord_prep.manifest import FORMAT_VERSION, PAIRS, TOKENIZER_FOLDER_NAME, Totals, read_manifest
from tfrecord_prep.partition import write_shards
from tfrecord_prep.prepare_tfrecord_shards import describe_split, stoppable
from tfrecord_prep.records import decode_feature, decode_rows, read_records
from tfrecord_prep.split import (
    SplitPlan,
    check_other_splits,
    complete_folder,
    default_shard_size,
    describe_first_row,
    failures_named,
    made_with,
)
from tfrecord_prep.split_folder import (
    PartitionResult,
    begin_folder,
    check_folder,
    finish_folder,
    partition_sha256,
    sidecar_name,
    write_sidecar,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Features that are as long as a row, those that are as long as its predictions, and the label.
IDS, MASK, SEGMENTS = "input_ids", "input_mask", "segment_ids"
POSITIONS, MASKED_IDS = "masked_lm_positions", "masked_lm_ids"
LABELS = "next_sentence_labels"
RECORDS_AT_ONCE = 1024
HINT = "Use fewer --num-workers."


@dataclass(frozen=True)
class ImportConfig(Bounded):
    """Which files become shards, and where."""

    FLAG_GROUP = "Import"

    data_files: list[str] = flag(
        list, "Files or quoted globs of TFRecord files, local or gs://, also compressed by gzip.", is_usual=True
    )
    tokenizer_name_or_path: str | None = flag(
        None,
        "Folder (local or gs://) or Hub id of the WordPiece tokenizer that the files were made with, such as "
        "google-bert/bert-base-uncased, or the output of convert_bert.py.",
        metavar="DIR",
        is_usual=True,
    )
    output_dir: str | None = flag(
        None, "Folder for the shards, local or gs://; they go to the folder --split in it.", is_usual=True
    )
    split: str = flag("train", "Name of the split to write, such as train or validation.", is_usual=True)
    drop_duplicates: bool = flag(
        False,
        "Leave out rows that are the same as an earlier one but for their masks, as the passes of --dupe_factor make "
        "of short documents. They are counted in any case.",
        is_usual=True,
    )
    shard_size: int | None = flag(None, "Rows per shard, at most. Default: 16,384 of up to 512 tokens.", at_least=1)
    num_workers: int | None = flag(None, "Number of worker processes. Default: one per core.", at_least=1)
    overwrite: bool = flag(False, "Replace shards in --output-dir that were made with other settings.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data_files), "is required: files of create_pretraining_data.py", "--data-files", "nothing")
        require(bool(self.tokenizer_name_or_path), "is required", "--tokenizer-name-or-path", "nothing")
        require(bool(self.output_dir), "is required: the folder for the shards", "--output-dir", "nothing")


@dataclass(frozen=True)
class ImportWork:
    """What a process needs to know to restore rows, and to write them."""

    folder: str
    max_length: int
    shard_size: int
    vocabulary_size: int
    special_ids: dict[str, int]


@dataclass(frozen=True)
class NumberedFile:
    """A file as a partition, and which of its records are left out, (number of records,)."""

    index: int
    sha256: str
    file: StoredFile
    is_left_out: NDArray[np.bool_]


@command
def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_arguments(
        [ImportConfig], argv, __doc__, needed=("data_files", "tokenizer_name_or_path", "output_dir")
    )
    log_start(__file__)
    output = open_folder(str(config.output_dir))
    output.check_writable()
    tokenizer = load_tokenizer(str(config.tokenizer_name_or_path))
    kind = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["type"]
    require(kind == "WordPiece", "must be a WordPiece one, as BERT's", "--tokenizer-name-or-path", kind)
    files = find_files([absolute_pattern(one) for one in config.data_files], "--data-files", is_text=False)
    fields = plan_fields(config, tokenizer, files)
    folder = output.path_of(config.split)
    with stoppable(), locked_folder(str(output)):
        is_complete = not config.overwrite and check_folder(folder, fields)
        plan = SplitPlan("", config.split, folder, "", fields, is_complete, "")
        check_other_splits([plan])
        if is_complete:
            finish_folder(folder)
        else:
            import_split(plan, files, tokenizer, config)
        print(describe_split(folder, read_manifest(folder)))
        print(describe_first_row(folder, tokenizer))
    if config.split not in HELD_OUT_SPLITS:
        model = folder_beside(str(output), "model")
        words = ["--preset", "bert-base", "--objective", "mlm+nsp", "--train-dataset", folder, "--output-dir", model]
        print(next_step("train/run_mlm.py", words))


def plan_fields(
    config: ImportConfig, tokenizer: "PreTrainedTokenizerFast", files: Sequence[StoredFile]
) -> dict[str, Any]:
    """Make the fields of the manifest that are known beforehand, as in JSON; rows are as long as the first one."""
    corpus = CorpusConfig(data_files=[absolute_pattern(one) for one in config.data_files], split=config.split)
    found = next(((file, record) for file in files for record in records_of(file)), None)
    if found is None:
        raise InputError(f"--data-files must have records; there is none in {len(files):,} files.")
    try:
        max_length = len(decode_feature(found[1], IDS))
    except (IndexError, KeyError, ValueError) as error:
        rule = f"is not of create_pretraining_data.py: its first record has no {IDS}."
        raise InputError(f"{found[0].name} {rule}") from error
    checksums = hashlib.sha256("".join(str(file.checksum) for file in files).encode()).hexdigest()
    fields = {
        "format_version": FORMAT_VERSION,
        "split": config.split,
        "max_length": max_length,
        "chunking": PAIRS,
        "shard_size": config.shard_size or default_shard_size(max_length),
        "partition_bytes": 0,  # a partition is a file
        **made_with(tokenizer),
        "corpus": {"settings": dataclasses.asdict(corpus), "data_files": [file_record(file) for file in files]},
        **({"deduplicated": {config.split: checksums}} if config.drop_duplicates else {}),
    }
    return dict(json.loads(json.dumps(fields)))


def import_split(
    plan: SplitPlan, files: Sequence[StoredFile], tokenizer: "PreTrainedTokenizerFast", config: ImportConfig
) -> None:
    """Check all files, then write those that an earlier run did not complete."""
    named = ("max_length", "shard_size")
    recorded = {name: plan.fields["tokenizer"][name] for name in ("vocabulary_size", "special_ids")}
    work = ImportWork(plan.folder, **{name: plan.fields[name] for name in named}, **recorded)
    num_processes, num_bytes = config.num_workers or num_cores(), sum(file.num_bytes for file in files)
    hashes: list[NDArray[np.uint8]] = []
    with progress_bar(f"Checking {len(files):,} files", "B", num_bytes) as bar:
        for file, found in zip(files, map_in_order(partial(hash_rows, work), files, num_processes, HINT), strict=True):
            hashes.append(found)
            bar.update(file.num_bytes)
    is_duplicate = are_seen(np.concatenate(hashes))
    what = "left out" if config.drop_duplicates else "kept; --drop-duplicates leaves them out"
    counted = f"{len(is_duplicate):,} rows in {len(files):,} files"
    print(f"{counted}, {is_duplicate.sum():,} the same as an earlier one ({what})")
    is_left_out = np.split(is_duplicate & config.drop_duplicates, np.cumsum([len(one) for one in hashes])[:-1])
    partitions = []
    for index, (file, of_file) in enumerate(zip(files, is_left_out, strict=True)):
        content = json.dumps([file.num_bytes, file.checksum])
        sha256 = partition_sha256(plan.fields, [content], of_file.tobytes())
        partitions.append(NumberedFile(index, sha256, file, of_file))
    with failures_named(plan.folder):
        complete, folder = begin_folder(plan.folder, plan.fields), open_folder(plan.folder)
        save_tokenizer(tokenizer, folder.path_of(TOKENIZER_FOLDER_NAME))
        missing = [one for one in partitions if complete.get(one.index) != one.sha256]
        folder.delete_files([sidecar_name(one.index) for one in missing if one.index in complete])
        with progress_bar(f"Writing {plan.place}", "B", sum(one.file.num_bytes for one in missing)) as bar:
            for num_bytes in map_in_order(partial(import_file, work), missing, num_processes, HINT):
                bar.update(num_bytes)
        complete_folder(plan, {one.index: one.sha256 for one in partitions}, BadRows())


def hash_rows(work: ImportWork, file: StoredFile) -> NDArray[np.uint8]:
    """Restore all rows of a file, and hash them; (number of records, HASH_BYTES)."""
    hashes = [
        hashlib.blake2b(ids.tobytes() + bytes([label]), digest_size=HASH_BYTES).digest()
        for rows, labels in restored_rows(work, file)
        for ids, label in zip(rows.input_ids, labels.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)


def import_file(work: ImportWork, numbered: NumberedFile) -> int:
    """Write the shards of a file, its sidecar last; return the bytes that were read."""
    id_counts, num_random, first = np.zeros(work.vocabulary_size, np.int64), 0, 0

    def kept() -> Iterator[Rows]:
        nonlocal first, num_random
        for rows, labels in restored_rows(work, numbered.file):
            is_kept = ~numbered.is_left_out[first : first + len(labels)]
            first += len(labels)
            some = Rows(rows.input_ids[is_kept], rows.num_tokens_per_row[is_kept], labels[is_kept])
            id_counts[:] += np.bincount(some.input_ids.ravel(), minlength=len(id_counts))
            num_random += int(labels[is_kept].sum())
            yield some

    shards = write_shards(work.folder, numbered.index, kept(), work.shard_size)
    id_counts[list(work.special_ids.values())] = 0
    num_rows, num_tokens = sum(shard.num_rows for shard in shards), sum(shard.num_tokens for shard in shards)
    totals = Totals(
        num_documents=0,  # which the records do not say
        num_blank_documents=0,
        num_tokens=num_tokens,
        num_padding_tokens=num_rows * work.max_length - num_tokens,
        num_rows=num_rows,
        num_random_pairs=num_random,
        num_duplicate_documents=int(numbered.is_left_out.sum()),
    )
    write_sidecar(work.folder, PartitionResult(numbered.index, numbered.sha256, shards, totals, BadRows(), id_counts))
    return numbered.file.num_bytes


def records_of(file: StoredFile) -> Iterator[bytes]:
    """Yield the serialized examples of a file; an InputError says where it is damaged."""
    try:
        with file.open() as raw:
            buffered = io.BufferedReader(raw, raw.read_ahead_bytes)
            is_compressed = buffered.peek(2)[:2] == b"\x1f\x8b"
            yield from read_records(gzip.GzipFile(fileobj=buffered) if is_compressed else buffered)
    except InputError:
        raise
    except (EOFError, ValueError, gzip.BadGzipFile) as error:
        raise InputError(f"{file.name} is not a complete TFRecord file: {error}.") from error


def restored_rows(work: ImportWork, file: StoredFile) -> Iterator[tuple[Rows, NDArray[np.int64]]]:
    """Yield the rows of a file, some at a time, with the masked tokens put back, and their labels, (rows,).

    Raises:
        InputError: a record of another form, of another length, or not of the tokenizer; says which.
    """
    records, first = records_of(file), 0
    while examples := list(itertools.islice(records, RECORDS_AT_ONCE)):
        try:
            rows, labels, problems = _restored(work, examples)
        except (IndexError, KeyError, ValueError) as error:
            place = f"{file.name}, in the records from {first:,} on"
            raise InputError(f"{place}: {error}. They must be those of create_pretraining_data.py.") from error
        for problem, is_bad in problems.items():
            if is_bad.any():
                raise InputError(f"{file.name}, record {first + int(np.argwhere(is_bad)[0, 0]):,}: {problem}.")
        yield rows, labels
        first += len(examples)


def _restored(
    work: ImportWork, examples: Sequence[bytes]
) -> tuple[Rows, NDArray[np.int64], dict[str, NDArray[np.bool_]]]:
    """Put the masked tokens back; return rows, labels, and {what is wrong: where}, each (num_rows, 1 or more)."""
    length, special = work.max_length, work.special_ids
    ids, mask, segments = (decode_rows(examples, name, length) for name in (IDS, MASK, SEGMENTS))
    labels = decode_rows(examples, LABELS, 1)[:, 0]
    num_predictions = len(decode_feature(examples[0], POSITIONS))
    positions = decode_rows(examples, POSITIONS, num_predictions)  # 0 where none is predicted: [CLS] never is
    masked_ids = decode_rows(examples, MASKED_IDS, num_predictions)
    is_outside = (positions < 0) | (positions >= length)
    rows, slots = np.nonzero((positions > 0) & ~is_outside)
    ids[rows, positions[rows, slots]] = masked_ids[rows, slots]
    size, num_tokens = work.vocabulary_size, mask.sum(axis=1)
    is_token = np.arange(length) < num_tokens[:, None]
    is_end = (ids == special["sep"]) & is_token
    is_second = (np.cumsum(is_end, axis=1) - is_end > 0) & is_token
    last_ids = ids[np.arange(len(ids)), num_tokens.clip(1, length) - 1]
    is_framed = (ids[:, 0] == special["cls"]) & (last_ids == special["sep"]) & (is_end.sum(axis=1) == 2)
    problems = {
        f"a masked position is outside the {length} of the row": is_outside,
        f"an id is outside the vocabulary of {size:,} of --tokenizer-name-or-path": (ids < 0) | (ids >= size),
        "input_mask is not ones, then zeros": mask != is_token,
        "it is not [CLS] A [SEP] B [SEP], with the ids of --tokenizer-name-or-path": ~is_framed[:, None],
        "the padding is not that of --tokenizer-name-or-path": (ids == special["pad"]) == is_token,
        "segment_ids are not 0 in A and 1 in B": segments != is_second,
        "a [MASK] is left that no masked_lm_ids replaces": ids == special["mask"],
        f"{LABELS} is neither 0 nor 1": ((labels < 0) | (labels > 1))[:, None],
    }
    return Rows(ids.astype(np.int32), num_tokens), labels, problems


if __name__ == "__main__":
    sys.exit(main())
