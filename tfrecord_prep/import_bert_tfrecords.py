r"""Import the masked TFRecord files that BERT's create_pretraining_data.py writes, as shards of segment pairs.

The files may come from Google's, NVIDIA's or Model Garden's version. They need the features input_ids, input_mask,
segment_ids, masked_lm_positions, masked_lm_ids and next_sentence_labels. The masked tokens are restored, because
run_mlm.py masks different tokens in each epoch. Each file is read twice, first to check it and then to convert it. If
the command is stopped, run it again: it continues where it stopped.

Examples:
    python tfrecord_prep/import_bert_tfrecords.py --data-files 'pretraining/*.tfrecord' \
        --tokenizer-name-or-path work/multi-cased --output-dir work/bert-records
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.cli.console import folder_beside, next_step
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import Bounded, flag, require
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.corpus import Corpus, Partition, Source
from mlm_common.corpus.identity import file_record
from mlm_common.corpus.text_files import ByteRange, absolute_pattern, find_files
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from mlm_common.folder_lock import locked_folder
from mlm_common.storage import open_folder, read_file, short_path
from mlm_common.storage.guard import guarded_read
from mlm_common.storage.reading import StoredFile
from mlm_common.tokenizer import load_tokenizer
from mlm_common.workers import Workers, num_cores
from tfrecord_prep.chunking import Rows
from tfrecord_prep.duplicates import FOLDER_NAME as HASHES_NAME
from tfrecord_prep.duplicates import HASH_BYTES, find_duplicates, hashes_name
from tfrecord_prep.manifest import FORMAT_VERSION, PAIRS, read_manifest
from tfrecord_prep.partition import NumberedPartition, SplitWork, Tally, write_partition
from tfrecord_prep.prepare_tfrecord_shards import describe_split, stoppable
from tfrecord_prep.records import decode_feature, decode_rows, read_records
from tfrecord_prep.split import (
    Engine,
    SplitPlan,
    check_other_splits,
    default_shard_size,
    describe_first_row,
    hash_split,
    made_with,
    prepare_split,
)
from tfrecord_prep.split_folder import check_folder, recorded_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Features with one value per token, features with one value per prediction, and the label.
IDS, MASK, SEGMENTS = "input_ids", "input_mask", "segment_ids"
POSITIONS, MASKED_IDS = "masked_lm_positions", "masked_lm_ids"
LABELS = "next_sentence_labels"
RECORDS_AT_ONCE = 1024


@dataclass(frozen=True)
class ImportConfig(Bounded):
    """Which files to import, and where to write the shards."""

    FLAG_GROUP = "Import"

    data_files: list[str] = flag(
        list, "TFRecord files or quoted globs, local or gs://. They may be compressed with gzip.", is_usual=True
    )
    tokenizer_name_or_path: str | None = flag(
        None,
        "WordPiece tokenizer that the files were made with: a folder (local or gs://), a Hub id such as "
        "google-bert/bert-base-uncased, or the output of convert_bert.py.",
        metavar="DIR",
        is_usual=True,
    )
    output_dir: str | None = flag(
        None, "Folder for the shards, local or gs://. They go to the subfolder named by --split.", is_usual=True
    )
    split: str = flag("train", "Name of the split to write, such as train or validation.", is_usual=True)
    drop_duplicates: bool = flag(
        False,
        "Leave out rows that differ from an earlier row only in their masks. --dupe_factor makes such rows from short "
        "documents. They are counted even without this flag.",
        is_usual=True,
    )
    shard_size: int | None = flag(
        None,
        "Maximum number of rows per shard. Default: 16,384, or fewer if rows have more than 512 tokens.",
        at_least=1,
    )
    num_workers: int | None = flag(None, "Number of worker processes. Default: one per core.", at_least=1)
    overwrite: bool = flag(False, "Replace shards in --output-dir that were made with other settings.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.data_files), "is required: files written by create_pretraining_data.py", "--data-files", "nothing"
        )
        require(bool(self.tokenizer_name_or_path), "is required", "--tokenizer-name-or-path", "nothing")
        require(bool(self.output_dir), "is required: the folder for the shards", "--output-dir", "nothing")


class RecordFiles(Corpus):
    """A corpus of TFRecord files, each of which is one partition."""

    def has_byte_ranges(self, *_: object) -> bool:
        return True

    def partitions(self, split_name: str, *_: object) -> Iterator[Partition]:
        return ([ByteRange(file)] for file in self.files(split_name))


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
    require(kind == "WordPiece", "must be a WordPiece tokenizer, like BERT's", "--tokenizer-name-or-path", kind)
    corpus = find_records(config)
    folder, hashes_folder = output.path_of(config.split), output.path_of(f"{HASHES_NAME}/{config.split}")
    before = {} if config.overwrite else recorded_plan(folder) or {}
    fields = plan_fields(config, tokenizer, corpus, before)
    num_processes = config.num_workers or num_cores()
    with stoppable(), locked_folder(str(output)), Workers(num_processes, "Use fewer --num-workers.") as workers:
        is_complete = not config.overwrite and check_folder(folder, fields)
        plan = SplitPlan("", config.split, folder, hashes_folder, fields, is_complete, "")
        check_other_splits([plan])

        def engine(work: SplitWork, partitions: Iterable[NumberedPartition]) -> Iterator[int]:
            return workers.map_in_order(partial(work_on_file, work), partitions)

        duplicates = {} if is_complete else look_for_duplicates(plan, corpus, engine, config)
        prepare_split(plan, corpus, tokenizer, engine, duplicates)
        output.subfolder(HASHES_NAME).delete()
        print(describe_split(folder, read_manifest(folder)))
        print(describe_first_row(folder, tokenizer))
    if config.split not in HELD_OUT_SPLITS:
        model = folder_beside(str(output), "model")
        words = ["--preset", "bert-base", "--objective", "mlm+nsp", "--train-dataset", folder, "--output-dir", model]
        print(next_step("train/run_mlm.py", words))


def find_records(config: ImportConfig) -> RecordFiles:
    patterns = [absolute_pattern(pattern) for pattern in config.data_files]
    files = find_files(patterns, "--data-files", is_text=False)
    corpus = CorpusConfig(data_files=patterns, split=config.split)
    record = {"settings": dataclasses.asdict(corpus), "data_files": [file_record(file) for file in files]}
    return RecordFiles(corpus, record, {config.split: Source(lambda _: (), tuple(files))})


def plan_fields(
    config: ImportConfig, tokenizer: "PreTrainedTokenizerFast", corpus: RecordFiles, before: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of the manifest that are known before the rows are read, as JSON values.

    The length of the first record becomes the `max_length` of all rows.

    Args:
        config: settings of the command.
        tokenizer: tokenizer that the files were made with.
        corpus: the files.
        before: plan of the shards that are already in the folder; empty if there are none. The plan's shard size is
            kept unless a flag sets a different one.
    """
    files = corpus.files(config.split)
    first_record = next(((file, record) for file in files for record in records_of(file)), None)
    if first_record is None:
        names = ", ".join(short_path(file.name) for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise InputError(f"--data-files must have records; there are none in {names}.")
    file, record = first_record
    try:
        max_length = len(decode_feature(record, IDS))
    except (IndexError, KeyError, ValueError) as error:
        raise InputError(
            f"{file.name} is not a file of create_pretraining_data.py: its first record has no {IDS}."
        ) from error
    checksums = hashlib.sha256("".join(str(file.checksum) for file in files).encode()).hexdigest()
    fields = {
        "format_version": FORMAT_VERSION,
        "split": config.split,
        "max_length": max_length,
        "chunking": PAIRS,
        "shard_size": config.shard_size or before.get("shard_size") or default_shard_size(max_length),
        "partition_bytes": 0,  # a partition is a file
        **made_with(tokenizer),
        "corpus": corpus.record,
        **({"deduplicated": {config.split: checksums}} if config.drop_duplicates else {}),
    }
    return dict(json.loads(json.dumps(fields)))


def look_for_duplicates(plan: SplitPlan, corpus: RecordFiles, engine: Engine, config: ImportConfig) -> dict[int, bytes]:
    """Check and hash all rows, print the number of duplicates, and return the rows to leave out.

    Returns:
        {partition number: flags} as in `find_duplicates`; empty without --drop-duplicates.
    """
    duplicates = find_duplicates({plan.folder: hash_split(plan, corpus, engine)})[plan.folder]
    consequence = "left out" if config.drop_duplicates else "kept; --drop-duplicates leaves them out"
    print(f"{sum(map(sum, duplicates.values())):,} rows are the same as an earlier row ({consequence})")
    return duplicates if config.drop_duplicates else {}


def work_on_file(work: SplitWork, numbered: NumberedPartition) -> int:
    """Hash the rows of a file, or write the rows that are not left out; return the number of the file's partition."""
    if work.owner is not None:
        work.owner.guard()
    (byte_range,) = numbered.partition
    assert isinstance(byte_range, ByteRange)
    restored = restored_rows(work, byte_range.file)
    if work.hashes_folder is not None:
        hashes = b"".join(map(hash_rows, restored))
        open_folder(work.hashes_folder).write_bytes(hashes_name(numbered.index, numbered.sha256), hashes)
        return numbered.index
    is_left_out = np.frombuffer(read_file(numbered.duplicates) if numbered.duplicates else b"", bool)
    tally = Tally(work, int(is_left_out.sum()))
    kept = without_rows(restored, is_left_out) if len(is_left_out) else restored
    return write_partition(numbered, tally.count_pairs(kept), tally, work, BadRows()).index


def hash_rows(rows: Rows) -> bytes:
    labels = np.asarray(rows.next_sentence_labels).tolist()
    pairs = (ids.tobytes() + bytes([label]) for ids, label in zip(rows.input_ids, labels, strict=True))
    return b"".join(hashlib.blake2b(pair, digest_size=HASH_BYTES).digest() for pair in pairs)


def without_rows(all_rows: Iterable[Rows], is_left_out: NDArray[np.bool_]) -> Iterator[Rows]:
    first = 0
    for rows in all_rows:
        is_kept = ~is_left_out[first : first + len(rows.input_ids)]
        first += len(is_kept)
        labels = np.asarray(rows.next_sentence_labels)
        yield Rows(rows.input_ids[is_kept], rows.num_tokens_per_row[is_kept], labels[is_kept])


def records_of(file: StoredFile) -> Iterator[bytes]:
    """Yield the serialized examples of a file, which may be compressed with gzip.

    Raises:
        InputError: the file is damaged; the message says where.
    """
    with guarded_read(file.name, "a complete TFRecord file"), file.open() as raw:
        buffered = io.BufferedReader(raw, raw.read_ahead_bytes)
        is_compressed = buffered.peek(2)[:2] == b"\x1f\x8b"
        yield from read_records(gzip.GzipFile(fileobj=buffered) if is_compressed else buffered)


def restored_rows(work: SplitWork, file: StoredFile) -> Iterator[Rows]:
    """Yield the rows of a file in batches, with the masked tokens restored.

    Raises:
        InputError: a record has a different format or length, or was not made with the tokenizer. The message names the
            record.
    """
    records, first = records_of(file), 0
    while examples := list(itertools.islice(records, RECORDS_AT_ONCE)):
        try:
            rows, problems = _restored(work, examples)
        except (IndexError, KeyError, ValueError) as error:
            raise InputError(
                f"{file.name}, in the records from {first:,} on: {error}. The records must come from "
                "create_pretraining_data.py."
            ) from error
        for problem, is_bad in problems.items():
            if is_bad.any():
                raise InputError(f"{file.name}, record {first + int(np.argwhere(is_bad)[0, 0]):,}: {problem}.")
        yield rows
        first += len(examples)


def _restored(work: SplitWork, examples: Sequence[bytes]) -> tuple[Rows, dict[str, NDArray[np.bool_]]]:
    """Restore the masked tokens.

    Returns:
        The rows, and {problem: mask of the rows or ids that have this problem}, (num_rows, 1) or (num_rows, length).
    """
    length, special = work.max_length, work.special_ids
    ids, mask, segments = (decode_rows(examples, name, length) for name in (IDS, MASK, SEGMENTS))
    labels = decode_rows(examples, LABELS, 1)[:, 0]
    num_predictions = len(decode_feature(examples[0], POSITIONS))
    positions = decode_rows(examples, POSITIONS, num_predictions)  # 0 ([CLS], never predicted) marks unused slots
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
        f"a masked position is outside the row of {length} tokens": is_outside,
        f"an id is outside the vocabulary of {size:,} tokens (--tokenizer-name-or-path)": (ids < 0) | (ids >= size),
        "input_mask is not ones, then zeros": mask != is_token,
        "it is not [CLS] A [SEP] B [SEP] with the tokenizer's ids (--tokenizer-name-or-path)": ~is_framed[:, None],
        "its padding is not the tokenizer's padding id (--tokenizer-name-or-path)": (ids == special["pad"]) == is_token,
        "segment_ids are not 0 in A and 1 in B": segments != is_second,
        "it has a [MASK] without a value in masked_lm_ids": ids == special["mask"],
        f"{LABELS} is neither 0 nor 1": ((labels < 0) | (labels > 1))[:, None],
    }
    return Rows(ids.astype(np.int32), num_tokens, labels), problems


if __name__ == "__main__":
    run_as_script(main)
