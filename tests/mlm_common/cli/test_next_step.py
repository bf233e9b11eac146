"""What a command says to type next is a command that its parser takes."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm_common.cli.command_line import parse_arguments
from mlm_common.cli.console import PROJECT_FOLDER, folder_beside, next_step
from mlm_common.corpus.config import CorpusConfig
from mlm_common.storage import short_path
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.prepare_tfrecord_shards import describe_next as next_after_shards
from tokenizer_training.train_unigram import describe_next as next_after_tokenizer
from train.config.settings import parse_training_config


def words_of(line: str) -> tuple[Path, list[str]]:
    start, _, command = line.partition(": ")
    python, script, *arguments = shlex.split(command)
    assert (start, python) == ("next", "python")
    return PROJECT_FOLDER / script, arguments


def test_after_the_tokenizer_come_the_shards(monkeypatch):
    monkeypatch.chdir(PROJECT_FOLDER)
    script, arguments = words_of(next_after_tokenizer("my work/tokenizer"))
    assert script == PROJECT_FOLDER / "tfrecord_prep" / "prepare_tfrecord_shards.py"
    assert script.is_file()
    _, config = parse_arguments([CorpusConfig, PrepareConfig], arguments, "")
    assert (config.tokenizer_name_or_path, config.output_dir) == ("my work/tokenizer", "my work/shards")


@pytest.mark.parametrize("with_validation", [True, False])
def test_after_the_shards_comes_the_training(with_validation):
    names = ["train", *["validation"] * with_validation]
    plans = [SimpleNamespace(source="", split_name=name, folder=f"gs://bucket/shards/{name}") for name in names]
    script, arguments = words_of(next_after_shards("gs://bucket/shards/", plans))
    assert script == PROJECT_FOLDER / "train" / "run_mlm.py"
    config = parse_training_config(arguments, None)
    assert config.data.train_dataset == "gs://bucket/shards/train"
    assert config.data.eval_dataset == ("gs://bucket/shards/validation" if with_validation else None)
    assert config.run.output_dir == "gs://bucket/model"
    assert config.optimization.max_steps == 1000


def test_after_the_shards_of_several_sources_comes_one_training_on_all():
    plans = [
        SimpleNamespace(source=source, split_name=split, folder=f"gs://bucket/shards/{source}/{split}")
        for source in ("de", "fo")
        for split in ("train", "validation")
    ]
    config = parse_training_config(words_of(next_after_shards("gs://bucket/shards", plans))[1], None)
    assert config.data.train_dataset == config.data.eval_dataset == "gs://bucket/shards"


def test_paths_are_as_one_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_path(f"{tmp_path}/books/*.txt") == "books/*.txt"
    assert short_path("/elsewhere/a.txt") == "/elsewhere/a.txt"
    assert folder_beside("tokenizer", "shards") == "shards"
    assert str(PROJECT_FOLDER) in next_step("train/run_mlm.py", [])
