"""The whole of stage 2: documents in, folders out that the trainer and the tutorial's reader accept."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.tokenizer import SPECIAL_TOKENS, save_tokenizer
from tests.fixtures.damaged_json import damaged
from tests.fixtures.tiny_corpus import DOCUMENTS, contents, flags, read_rows, wrapped, write_source
from tfrecord_prep.manifest import open_shards, read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main

SCRIPT = Path(__file__).parents[2] / "tfrecord_prep" / "prepare_tfrecord_shards.py"


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(source / "tokenizer")


def test_two_workers_write_the_same_without_tensorflow(source, tmp_path):
    extra_flags = ["--validation-percent", "20", "--chunking", "packed"]
    main(flags(source, tmp_path / "one", *extra_flags))
    arguments = flags(source, tmp_path / "two", *extra_flags, "--num-workers", "2")
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # of the workers too
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "--block-attention" in done.stdout.splitlines()[-1]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert {"train/manifest.json", "validation/manifest.json"} <= set(contents(tmp_path / "one"))
    assert "tfrecord_prep.partition" in done.stderr
    assert not re.search(r"\| +(tensorflow|tf_keras|torch)\b", done.stderr)


def test_ids_beyond_16_bits(tmp_path):
    words = [*SPECIAL_TOKENS.values(), *(f"w{number}" for number in range(70_000))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(wrapped(backend), str(tmp_path / "tokenizer"))
    (tmp_path / "docs.txt").write_text("w0 w65530 w65531\nw69999 unheard w1\n", encoding="utf-8")
    arguments = ["--tokenizer-name-or-path", str(tmp_path / "tokenizer"), "--data-files", str(tmp_path / "docs.txt")]
    assert main([*arguments, "--output-dir", str(tmp_path), "--max-length", "16", "--num-workers", "1"]) == 0
    assert read_rows(tmp_path / "train") == [[0, 5, 65535, 65536, 2, 0, 70004, 3, 6, 2]]
    manifest = read_manifest(str(tmp_path / "train"))
    assert manifest.tokenizer.vocabulary_size == 70_005
    assert manifest.unigram_entropy_nats == pytest.approx(np.log(5))  # the unknown token does not count


def test_three_splits_in_one_command(source, tmp_path, tokenizer, run):
    shown = run(main, *flags(source, tmp_path), "--validation-percent", 20, "--test-percent", 10, "--seed", 3).out
    assert "--block-attention" not in shown
    texts = []
    for split in ("train", "validation", "test"):
        manifest = read_manifest(str(tmp_path / split))
        assert manifest.corpus["settings"]["seed"] == 3
        totals = manifest.totals
        assert f"  tokens              {totals.num_tokens:,}\n  rows                {totals.num_rows:,}" in shown
        stream = list(chain.from_iterable(read_rows(tmp_path / split)))
        texts += tokenizer.decode(stream, clean_up_tokenization_spaces=False).split("[CLS]")
    documents = [text.removesuffix("[SEP]").strip() for text in texts if text]
    assert sorted(documents) == sorted(text for text in DOCUMENTS if text.strip())


def test_the_default_corpus_is_that_of_the_tokenizer(source, tmp_path, run, caplog):
    main(flags(source, tmp_path / "named", "--validation-percent", "20"))
    corpus = read_manifest(str(tmp_path / "named" / "train")).corpus
    recorded = corpus | {"settings": corpus["settings"] | {"limit": 50}}  # enough to train a tokenizer on
    folder = tmp_path / "tokenizer"
    save_tokenizer(PreTrainedTokenizerFast.from_pretrained(source / "tokenizer"), str(folder))
    (folder / "training.json").write_text(json.dumps({"corpus": recorded}), encoding="utf-8")

    unnamed = flags(source, tmp_path / "unnamed", tokenizer=folder, corpus=())
    with caplog.at_level(logging.INFO):
        assert main(unnamed) == 0
    message = next(message for message in caplog.messages if message.startswith("Using the corpus"))
    assert message.endswith(f" --data-files {source / 'docs.jsonl'} --sample-by line --validation-percent 20.0")
    assert contents(tmp_path / "unnamed") == contents(tmp_path / "named")

    (folder / "training.json").unlink()
    assert "that names one. Pass --data-files or --dataset-name" in run(main, *unnamed).error


def test_cloud_storage_holds_the_same_bytes(source, tmp_path, cloud):
    main(flags(source, tmp_path))
    cloud.put("run/train/dataset-00009-00000-7.tfrecord", b"of a run that was cut short")
    assert main(flags(source, "gs://test-bucket/run")) == 0
    assert open_shards("gs://test-bucket/run/train").manifest == open_shards(str(tmp_path / "train")).manifest
    assert cloud.objects() == {f"run/{name}": data for name, data in contents(tmp_path).items()}


def test_warning_of_splits_that_the_tokenizer_has_seen(tmp_path, caplog):
    source = write_source(tmp_path)
    seen = open_corpus(CorpusConfig(data_files=[str(source / "docs.jsonl")], validation_percent=20))
    (source / "tokenizer" / "training.json").write_text(json.dumps({"corpus": seen.record}), encoding="utf-8")
    (tmp_path / "others.txt").write_text("".join(f"another text {number}\n" for number in range(300)), encoding="utf-8")
    splits = ["--validation-percent", "20", "--test-percent", "20", "--dry-run"]
    with caplog.at_level(logging.WARNING):
        assert main(flags(source, tmp_path / "out", *splits[:2], "--dry-run")) == 0
        assert main(flags(source, tmp_path / "out", *splits, "--data-files", str(tmp_path / "others.txt"))) == 0
        assert "tokenizer was trained on" not in caplog.text
        caplog.clear()
        assert main(flags(source, tmp_path / "out", *splits)) == 0
    (message,) = caplog.messages
    assert "trained on documents of the split `test`" in message


@given(st.data())
@settings(max_examples=20)
def test_a_damaged_record_of_the_tokenizer_is_one_line(source, tmp_path_factory, run, data):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(source / "tokenizer", folder / "tokenizer")
    corpus = open_corpus(CorpusConfig(data_files=[str(source / "docs.jsonl")])).record
    record = data.draw(st.sampled_from([{"corpus": corpus}, {"sources": {"a": corpus}, "source_weights": {"a": 1.0}}]))
    (folder / "tokenizer" / "training.json").write_bytes(data.draw(damaged(record)))
    command = flags(source, folder / "out", "--dry-run", tokenizer=folder / "tokenizer", corpus=())
    outcome = run(main, *command)
    if outcome.status:
        assert re.match(r"error: .", outcome.refusal)
        assert "\n" not in outcome.error
