"""Records as BERT's create_pretraining_data.py writes them become the rows that they were before they were masked."""

import gzip
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import tensorflow as tf

from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256
from tests.fixtures.bert_tfrecords import (
    CLS,
    MASK,
    SEP,
    Instance,
    documents,
    example,
    instances,
    write_files,
    write_tokenizer,
)
from tests.fixtures.tiny_corpus import train_tiny_tokenizer
from tfrecord_prep.import_bert_tfrecords import main
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.records import LABEL_KEY, decode_feature, read_records
from tfrecord_prep.verify import verify_split
from train.run_mlm import main as train


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("wordpiece"))


def flags(pattern: str, tokenizer: Path, output: Path, *extra_flags: str) -> list[str]:
    named = ["--data-files", pattern, "--tokenizer-name-or-path", str(tokenizer), "--output-dir", str(output)]
    return [*named, "--shard-size", "50", "--num-workers", "1", *extra_flags]


def read_instances(folder: Path) -> list[Instance]:
    rows = []
    for path in open_shards(str(folder)).paths:
        for record in read_records(Path(path).read_bytes()):
            ids = decode_feature(record, "input_ids")[decode_feature(record, "attention_mask") == 1].tolist()
            middle = ids.index(SEP) + 1
            label = int(decode_feature(record, LABEL_KEY)[0])
            rows.append((ids, [0] * middle + [1] * (len(ids) - middle), label))
    return rows


def in_order_of_files(made: list[Instance], num_files: int = 3) -> list[Instance]:
    return [instance for number in range(num_files) for instance in made[number::num_files]]


def test_the_rows_are_those_of_before_the_masks_and_can_be_trained_on(tokenizer, tmp_path, capsys):
    made = instances(documents(tokenizer), dupe_factor=2)
    held_out = [(ids[:1] + ids[1:-1][::-1] + ids[-1:], [], label) for ids, _, label in made[:30]]
    held_out = [(ids, [int(SEP in ids[:place]) for place in range(len(ids))], label) for ids, _, label in held_out]
    for name, rows in {"train": made, "validation": held_out}.items():
        (tmp_path / name).mkdir()
        pattern = write_files(tmp_path / name, rows)
        assert main(flags(pattern, tokenizer, tmp_path / "out", "--split", name)) == 0
        assert read_instances(tmp_path / "out" / name) == in_order_of_files(rows)
        assert "correct. Checked" in verify_split(str(tmp_path / "out" / name), 1)
    assert capsys.readouterr().out.count("train/run_mlm.py") == 1  # rows for evaluation are not trained on

    manifest = open_shards(str(tmp_path / "out" / "train")).manifest
    assert manifest.chunking == "segment_pairs"
    assert manifest.tokenizer.sha256 == tokenizer_sha256(load_tokenizer(str(tokenizer)))
    assert manifest.totals.num_random_pairs == sum(label for *_, label in made)
    assert manifest.totals.num_tokens == sum(len(ids) for ids, *_ in made)
    data = ["--train-dataset", f"{tmp_path}/out/train", "--eval-dataset", f"{tmp_path}/out/validation"]
    model = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
    preset = ["--preset", "bert-base", "--config-overrides", model, "--objective", "mlm+nsp"]
    assert train([*preset, *data, "--max-steps", "2", "--output-dir", f"{tmp_path}/run", "--dry-run"]) == 0


def test_rows_that_differ_in_their_masks_only_are_counted_and_left_out_if_asked(tokenizer, tmp_path, run):
    made = instances(documents(tokenizer), dupe_factor=1)
    pattern = write_files(tmp_path, [*made, *made[::2]])
    kept = run(main, *flags(pattern, tokenizer, tmp_path / "kept"))
    num_copies = len(made) + len(made[::2]) - len({(tuple(ids), label) for ids, _, label in made})
    assert f"{num_copies:,} rows are the same as an earlier row (kept" in kept.out
    assert main(flags(pattern, tokenizer, tmp_path / "out", "--drop-duplicates")) == 0
    rows = Counter((tuple(ids), label) for ids, _, label in read_instances(tmp_path / "out" / "train"))
    assert rows == Counter({(tuple(ids), label) for ids, _, label in made})
    assert open_shards(str(tmp_path / "out" / "train")).manifest.totals.num_duplicate_documents == num_copies
    refused = run(main, *flags(pattern, tokenizer, tmp_path / "out")).refusal
    assert "contains shards with other settings: deduplicated" in refused


PAIR: Instance = ([CLS, 5, 6, SEP, 7, SEP], [0, 0, 0, 0, 1, 1], 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"masked_lm_ids": [99, 0, 0, 0]}, "record 1: an id is outside the vocabulary of 35"),
        ({"masked_lm_positions": [24, 0, 0, 0]}, "record 1: a masked position is outside the row of 24 tokens"),
        (
            {"masked_lm_positions": [0, 0, 0, 0], "input_ids": [CLS, MASK, 6, SEP, 7, SEP] + [0] * 18},
            r"it has a \[MASK\] without a value",
        ),
        ({"input_ids": [SEP, 5, 6, SEP, 7, SEP] + [0] * 18}, r"record 1: it is not \[CLS\] A \[SEP\] B \[SEP\]"),
        ({"segment_ids": [0] * 24}, "record 1: segment_ids are not 0 in A and 1 in B"),
        ({"input_mask": [1] * 7 + [0] * 17}, "record 1: it is not"),
        ({"next_sentence_labels": [2]}, "record 1: next_sentence_labels is neither 0 nor 1"),
        ({"next_sentence_labels": []}, "is not an example with next_sentence_labels"),
        ({"input_ids": [CLS, 5, SEP, 7, SEP]}, "row 1 has 5 values of input_ids, not 24"),
    ],
)
def test_a_record_that_is_wrong_is_one_line_and_nothing_is_written(changed, message, tokenizer, tmp_path, run):
    path, draw = tmp_path / "wrong.tfrecord", random.Random(0)
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(example(PAIR, draw))
        writer.write(example(PAIR, draw, **changed))
    assert re.search(message, run(main, *flags(str(path), tokenizer, tmp_path / "out")).refusal)
    assert not list((tmp_path / "out").rglob("*.tfrecord"))


def test_files_that_are_compressed_damaged_or_of_another_kind(tokenizer, tmp_path, run):
    made = instances(documents(tokenizer), dupe_factor=1)
    path = Path(write_files(tmp_path, made, num_files=1).replace("*", "0"))
    packed = tmp_path / "tf_examples.tfrecord.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert main(flags(str(packed), tokenizer, tmp_path / "packed")) == 0
    assert read_instances(tmp_path / "packed" / "train") == made
    path.write_bytes(path.read_bytes()[:-3])
    damaged = tmp_path / "damaged.tfrecord.gz"
    damaged.write_bytes(packed.read_bytes()[:50] + bytes(100) + packed.read_bytes()[150:])
    train_tiny_tokenizer().save_pretrained(tmp_path / "unigram")
    (tmp_path / "notes.txt").write_text("not records", encoding="utf-8")
    for files, named, message in (
        (str(path), tokenizer, "must be a complete TFRecord file; the record at byte"),
        (str(tmp_path / "notes.txt"), tokenizer, "must be a complete TFRecord file; no record starts at byte 0"),
        (str(damaged), tokenizer, "must be a complete TFRecord file; "),
        (str(tmp_path / "*.none"), tokenizer, "--data-files: no file matches"),
        (str(packed), tmp_path / "unigram", "--tokenizer-name-or-path must be a WordPiece tokenizer"),
    ):
        assert message in run(main, *flags(files, named, tmp_path / "out")).refusal
