"""What a command says to type next is a command that its parser takes."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm_common.cli.command_line import parse_arguments
from mlm_common.cli.console import PROJECT_FOLDER
from mlm_common.corpus.config import CorpusConfig
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.prepare_tfrecord_shards import describe_next as next_after_shards
from tokenizer_training.train_unigram import describe_next as next_after_tokenizer
from train.config.settings import parse_training_config


def words_of(line: str) -> tuple[Path, list[str]]:
    start, _, command = line.partition(": ")
    python, script, *arguments = shlex.split(command)
    assert (start, python) == ("next", "python")
    return PROJECT_FOLDER / script, arguments


def books(num_bytes: int) -> Any:
    """The corpus of a file of this size."""
    record = {"data_files": [{"num_bytes": num_bytes}]}
    corpus = SimpleNamespace(record=record, config=SimpleNamespace(split="train"), files=lambda _: ["books/a.txt"])
    return SimpleNamespace(corpora={"": corpus})


@pytest.mark.parametrize(("num_bytes", "length"), [(2_500_000, 128), (10**11, 512)])
def test_after_the_tokenizer_come_the_shards(num_bytes, length, monkeypatch):
    monkeypatch.chdir(PROJECT_FOLDER)
    script, arguments = words_of(next_after_tokenizer("my work/tokenizer", books(num_bytes)))
    assert script == PROJECT_FOLDER / "tfrecord_prep" / "prepare_tfrecord_shards.py"
    assert script.is_file()
    _, config = parse_arguments([CorpusConfig, PrepareConfig], arguments, "")
    assert (config.tokenizer_name_or_path, config.output_dir) == ("my work/tokenizer", "my work/shards")
    assert config.max_length == length


@pytest.mark.parametrize("sources", [("",), ("de", "fo")], ids=["one corpus", "sources"])
@pytest.mark.parametrize("splits", [("train", "validation"), ("train",)], ids=["validation", "none"])
@pytest.mark.parametrize(
    ("num_rows", "num_epochs", "max_steps", "chunking"), [(5_000, 10, None, "packed"), (100_000, 1, 1000, "concat")]
)
def test_after_the_shards_comes_the_training(sources, splits, num_rows, num_epochs, max_steps, chunking):
    """A few megabytes are read ten times, as README does; a large corpus not even once."""
    folder = "gs://bucket/shards"
    plans = [
        SimpleNamespace(source=source, split_name=split, folder="/".join(filter(None, (folder, source, split))))
        for source in sources
        for split in splits
    ]
    script, arguments = words_of(next_after_shards(folder, plans, num_rows, chunking))
    assert script == PROJECT_FOLDER / "train" / "run_mlm.py"
    config = parse_training_config(arguments, None)
    ending = "/{}" if sources == ("",) else ""
    assert config.data.train_dataset == folder + ending.format("train")
    assert config.data.eval_dataset == (folder + ending.format("validation") if splits[1:] else None)
    assert config.run.output_dir == "gs://bucket/model"
    assert (config.optimization.num_epochs, config.optimization.max_steps) == (num_epochs, max_steps)
    assert config.model.block_attention == (chunking == "packed")


def test_readme_types_what_is_printed():
    """A few megabytes of books: the commands print the ones that follow in README."""
    readme = (PROJECT_FOLDER / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Your own text$(.*?)^## ", readme, flags=re.M | re.S)
    parts = ("train", "validation")
    plans = [SimpleNamespace(source="", split_name=part, folder=f"work/shards/{part}") for part in parts]
    for line in (
        next_after_tokenizer("work/tokenizer", books(2_500_000)),
        next_after_shards("work/shards", plans, 5_000, "concat"),
    ):
        script, printed = words_of(line)
        name = str(script.relative_to(PROJECT_FOLDER))
        (typed,) = re.findall(rf"^python {name} ((?:.*\\\n)*.*)$", section, flags=re.M)
        assert sorted(shlex.split(typed.replace("\\\n", " "))) == sorted(printed)
