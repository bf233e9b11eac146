"""The whole of stage 2: documents in, folders out that the trainer and the tutorial's reader accept."""

import json
import os
import re
import resource
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.servers.fixtures import CloudStorageHandle
from tfrecord_prep.manifest import open_shards, read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main
from tfrecord_prep.records import decode_feature, read_records
from tokenizer_training import cloud_storage as cloud_client
from tokenizer_training.tokenizer import SPECIAL_TOKENS, save_tokenizer, special_ids, tokenizer_sha256

SCRIPT = Path(__file__).parent.parent / "tfrecord_prep" / "prepare_tfrecord_shards.py"
SENTENCE = "a corpus of small words makes many rows when each document says something else about [MASK] and <pad>"
WORDS = SENTENCE.split()
BLANK = ["", " \t "]
DOCUMENTS = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 3 + i % 23)) for i in range(90)]
DOCUMENTS[10:10] = BLANK


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=list(SPECIAL_TOKENS.values()), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(DOCUMENTS, trainer)
    return wrapped(backend)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a corpus, `docs.jsonl`, and a tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    save_tokenizer(tokenizer, str(folder / "tokenizer"))
    return folder


def flags(source: Path, output: Path | str, *more: str) -> list[str]:
    """Return arguments that make several partitions, and several shards of each."""
    tokenizer, corpus = str(source / "tokenizer"), str(source / "docs.jsonl")
    paths = ["--tokenizer-name-or-path", tokenizer, "--data-files", corpus, "--output-dir", str(output)]
    sizes = ["--max-length", "16", "--shard-size", "5", "--partition-bytes", "2048", "--num-workers", "1"]
    return [*paths, *sizes, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_rows(folder: Path) -> list[list[int]]:
    """Return all rows without their padding, having checked files, masks and counts against each other."""
    shards, rows = open_shards(str(folder)), []
    pad_id = shards.manifest.tokenizer.special_ids["pad"]
    for path, num_rows in zip(shards.paths, shards.num_rows_per_shard, strict=True):
        records = list(read_records(Path(path).read_bytes()))
        assert len(records) == num_rows
        for record in records:
            ids, mask = decode_feature(record, "input_ids"), decode_feature(record, "attention_mask")
            assert len(ids) == shards.manifest.max_length
            assert (ids == pad_id).tolist() == (mask == 0).tolist()
            rows.append(ids[mask == 1].tolist())
    return rows


@pytest.mark.parametrize("chunking", ["concat", "full_sentences"])
def test_tokens_in_are_tokens_written(
    source: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, chunking: str
) -> None:
    assert main(flags(source, tmp_path, "--chunking", chunking)) == 0
    rows = read_rows(tmp_path / "train")
    ids = special_ids(tokenizer)
    text = [token for token in chain.from_iterable(rows) if token not in (ids["cls"], ids["sep"])]
    assert not set(text) & {ids["mask"], ids["pad"], ids["unk"]}
    assert tokenizer.decode(text, clean_up_tokenization_spaces=False).split() == " ".join(DOCUMENTS).split()

    manifest = read_manifest(str(tmp_path / "train"))
    num_tokens = sum(map(len, rows))
    totals = manifest.totals
    assert (totals.num_documents, totals.num_blank_documents) == (len(DOCUMENTS), len(BLANK))
    assert (totals.num_tokens, totals.num_rows) == (num_tokens, len(rows))
    assert totals.num_padding_tokens == len(rows) * 16 - num_tokens
    assert sum(shard.num_tokens for shard in manifest.shards) == num_tokens
    assert manifest.tokenizer.sha256 == tokenizer_sha256(tokenizer)
    frequencies = np.unique(text, return_counts=True)[1] / len(text)
    assert manifest.unigram_entropy_nats == pytest.approx(-(frequencies * np.log(frequencies)).sum())


def test_names_number_partitions_and_shards(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path))
    names = [shard.name for shard in read_manifest(str(tmp_path / "train")).shards]
    assert names == sorted(names)
    partitions_and_shards = [tuple(map(int, name.split("-")[1:3])) for name in names]
    assert {partition for partition, _ in partitions_and_shards} == set(range(partitions_and_shards[-1][0] + 1))
    assert {shard for _, shard in partitions_and_shards} > {0, 1}
    on_disk = {path.name for path in (tmp_path / "train").iterdir()}
    assert on_disk == {*names, "manifest.json", "tokenizer"}


def test_the_script_with_two_workers_writes_the_same_bytes_without_tensorflow(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path / "one", "--validation-percent", "20"))
    arguments = flags(source, tmp_path / "two", "--validation-percent", "20", "--num-workers", "2")
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # of the workers too
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert {"train/manifest.json", "validation/manifest.json"} <= set(contents(tmp_path / "one"))
    assert "tfrecord_prep.partition" in done.stderr
    assert not re.search(r"\| +(tensorflow|tf_keras|torch)\b", done.stderr)


def test_help_is_quick_and_imports_no_tensorflow() -> None:
    command = [sys.executable, "-X", "importtime", str(SCRIPT), "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Seconds of work, which other programs on the machine do not add to.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert not re.search(r"\| +(tensorflow|tf_keras|torch|datasets)\b", done.stderr)
    tutorial_flags = "dataset_name dataset_config trust_remote_code tokenizer_name_or_path shard_size split limit"
    for flag in [*tutorial_flags.split(), "max_length", "output_dir", "num-workers", "chunking", "dry-run"]:
        assert f"--{flag}" in done.stdout


def test_the_reader_of_the_tutorial_reads_the_shards(source: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    main(flags(source, tmp_path))
    files = tf.io.gfile.glob(str(tmp_path / "train" / "*.tfrecord"))
    num_samples = sum(int(re.search(r"-\d+-(\d+)\.tfrecord", file).group(1)) for file in files)
    features = {name: tf.io.FixedLenFeature((16,), tf.int64) for name in ("input_ids", "attention_mask")}
    dataset = tf.data.TFRecordDataset(sorted(files)).map(lambda record: tf.io.parse_single_example(record, features))
    examples = list(dataset.as_numpy_iterator())
    assert num_samples == len(examples) == read_manifest(str(tmp_path / "train")).totals.num_rows
    assert [example["input_ids"][example["attention_mask"] == 1].tolist() for example in examples] == read_rows(
        tmp_path / "train"
    )


def test_shards_made_by_the_method_of_the_tutorial_are_opened(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    import tensorflow as tf

    stream = list(chain.from_iterable([0, *ids, 2] for ids in tokenizer(DOCUMENTS)["input_ids"]))
    rows = [stream[start : start + 16] for start in range(0, len(stream) - 15, 16)]  # drops the remainder
    for shard, start in enumerate(range(0, len(rows), 20)):
        shard_rows = rows[start : start + 20]
        with tf.io.TFRecordWriter(str(tmp_path / f"dataset-{shard}-{len(shard_rows)}.tfrecord")) as writer:
            for row in shard_rows:
                lists = {"input_ids": row, "attention_mask": [1] * 16}
                feature = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=v)) for name, v in lists.items()}
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    shards = open_shards(str(tmp_path))
    assert (shards.num_rows, shards.manifest, shards.tokenizer_folder) == (len(rows), None, None)
    records = chain.from_iterable(read_records(Path(path).read_bytes()) for path in shards.paths)
    assert sorted(decode_feature(record, "input_ids").tolist() for record in records) == sorted(rows)


def test_ids_beyond_16_bits(tmp_path: Path) -> None:
    words = [*SPECIAL_TOKENS.values(), *(f"w{number}" for number in range(70_000))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(wrapped(backend), str(tmp_path / "tokenizer"))
    (tmp_path / "docs.txt").write_text("w0 w65530 w65531\nw69999 unheard w1\n")
    arguments = ["--tokenizer-name-or-path", str(tmp_path / "tokenizer"), "--data-files", str(tmp_path / "docs.txt")]
    assert main([*arguments, "--output-dir", str(tmp_path), "--max-length", "16", "--num-workers", "1"]) == 0
    assert read_rows(tmp_path / "train") == [[0, 5, 65535, 65536, 2, 0, 70004, 3, 6, 2]]
    manifest = read_manifest(str(tmp_path / "train"))
    assert manifest.tokenizer.vocabulary_size == 70_005
    assert manifest.unigram_entropy_nats == pytest.approx(np.log(5))  # the unknown token does not count


def test_tokenizer_travels_with_the_shards(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path))
    shards = open_shards(str(tmp_path / "train"))
    copied = PreTrainedTokenizerFast.from_pretrained(shards.tokenizer_folder)
    assert tokenizer_sha256(copied) == shards.manifest.tokenizer.sha256


def test_split_names_the_folder(source: Path, tmp_path: Path) -> None:
    files = ["--validation-files", str(source / "docs.jsonl")]
    assert main(flags(source, tmp_path, "--split", "part", "--limit", "30", *files)) == 0
    totals = {name: read_manifest(str(tmp_path / name)).totals for name in ("part", "validation")}
    assert (totals["part"].num_documents, totals["validation"].num_documents) == (30, len(DOCUMENTS))


def test_corpus_of_the_tokenizer_is_the_default(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(flags(source, tmp_path / "named", "--validation-percent", "20"))
    corpus = read_manifest(str(tmp_path / "named" / "train")).corpus
    recorded = corpus | {"settings": corpus["settings"] | {"limit": 50}}  # enough to train a tokenizer on
    folder = tmp_path / "tokenizer"
    save_tokenizer(PreTrainedTokenizerFast.from_pretrained(source / "tokenizer"), str(folder))
    (folder / "training.json").write_text(json.dumps({"corpus": recorded}))

    unnamed = flags(source, tmp_path / "unnamed")
    unnamed[1] = str(folder)
    del unnamed[2:4]
    assert main(unnamed) == 0
    assert contents(tmp_path / "unnamed") == contents(tmp_path / "named")

    (folder / "training.json").unlink()
    assert main(unnamed) == 2
    assert "A corpus is needed: --dataset-name" in capsys.readouterr().err


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(flags(source, tmp_path / "out", "--dry-run")) == 0
    assert f"{tmp_path}/out/train: to be written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_complete_folder_is_left_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(flags(source, tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert main(flags(source, tmp_path)) == 0
    assert "complete with these settings, left as it is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_folder_that_was_cut_short_is_made_again(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path))
    before = contents(tmp_path)
    folder = tmp_path / "train"
    (folder / "manifest.json").unlink()
    (folder / "dataset-00009-00000-7.tfrecord").write_bytes(b"of a longer run")
    (folder / ".dataset-00001-00000-5.tfrecord.0a.partial").write_bytes(b"half")
    assert main(flags(source, tmp_path)) == 0
    assert contents(tmp_path) == before


def test_overwrite_replaces_other_settings(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path / "out"))
    main(flags(source, tmp_path / "fresh", "--max-length", "32"))
    assert main(flags(source, tmp_path / "out", "--max-length", "32", "--overwrite")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_cloud_storage_holds_the_same_bytes(
    source: Path, tmp_path: Path, cloud_storage: CloudStorageHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud_storage.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    cloud_client._client.cache_clear()
    main(flags(source, tmp_path))
    cloud_storage.put("run/train/dataset-00009-00000-7.tfrecord", b"of a run that was cut short")
    try:
        assert main(flags(source, "gs://test-bucket/run")) == 0
        assert open_shards("gs://test-bucket/run/train").manifest == open_shards(str(tmp_path / "train")).manifest
    finally:
        cloud_client._client.cache_clear()
    expected = {f"run/{name}": data for name, data in contents(tmp_path).items()}
    assert cloud_storage.objects() == expected


def change_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"max_length": 16', '"max_length": 24'))


def truncate_shard(folder: Path) -> None:
    next(folder.glob("dataset-00001-*")).write_bytes(b"")


def leave_foreign_shards(folder: Path) -> None:
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink()
    (folder / "dataset-0-1000.tfrecord").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change_manifest, r"other settings: max_length is 24 there, 16 is asked for.*--overwrite"),
        (truncate_shard, r"has 0 bytes of .*--overwrite"),
        (leave_foreign_shards, r"this command did not write, such as dataset-0-1000\.tfrecord.*--overwrite"),
    ],
)
def test_folder_in_the_way(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, spoil: object, message: str
) -> None:
    main(flags(source, tmp_path))
    spoil(tmp_path / "train")  # type: ignore[operator]
    before = contents(tmp_path)
    capsys.readouterr()
    assert main(flags(source, tmp_path)) == 2
    assert re.search(message, capsys.readouterr().err)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-length", "7"], "--max-length must be at least 8"),
        (["--shard-size", "0"], "--shard-size must be 1 row or more"),
        (["--partition-bytes", "10"], "--partition-bytes must be at least 1,024"),
        (["--num-workers", "0"], "--num-workers must be 1 or more"),
        (["--tokenizer-name-or-path", ""], "A tokenizer is needed: --tokenizer-name-or-path"),
        (["--output-dir", ""], "A folder for the shards is needed: --output-dir"),
        (["--output-dir", __file__], "Not a directory"),
        (["--tokenizer-name-or-path", "/nowhere"], "/nowhere"),
        (["--data-files", "/nowhere.txt"], "--data-files must name local files; no file matches '/nowhere.txt'"),
        (["--limit", "2", "--validation-percent", "0.001"], "A split must hold text; validation has 0 documents"),
    ],
)
def test_bad_input_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], message: str
) -> None:
    assert main(flags(source, tmp_path, *more)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "validation" / "manifest.json").exists()


def test_unknown_chunking_names_the_choices(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(flags(source, tmp_path, "--chunking", "sentences"))
    assert "concat" in capsys.readouterr().err


def test_tokenizer_without_mask(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "[CLS]": 1, "[SEP]": 2, "<pad>": 3}, unk_token="<unk>"))
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items() if name != "mask"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "tokenizer")
    assert main(flags(source, tmp_path / "out", "--tokenizer-name-or-path", str(tmp_path / "tokenizer"))) == 2
    assert "lacks mask" in capsys.readouterr().err


def test_no_module_of_the_script_hides_another() -> None:
    import importlib.metadata

    installed = importlib.metadata.packages_distributions()
    names = {path.stem for path in SCRIPT.parent.glob("*.py")} - {"__init__"}
    assert not names & (set(sys.stdlib_module_names) | set(installed))
