"""The three stages as the campaign runs them: the command, its input, and what its end must look like byte for byte."""

import abc
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.fixtures.generated_text import generated_lines
from tests.fixtures.same_run import CLOCK_FIGURES
from tests.fixtures.tiny_corpus import WORDS, contents, flags
from tests.fixtures.tiny_run import MODEL, write_shards
from tfrecord_prep.prepare_tfrecord_shards import main as prepare

NUM_FILES, NUM_DOCUMENTS = 4, 100
NUM_LINES = 1_500
NUM_STEPS = 10


class Stage(abc.ABC):
    """One command on small data.

    folder: of its input, which a test may copy and change.
    push_flags: with which it pushes to a repository of the Hub, of this kind, among others the file `pushed`.
    """

    name: str
    module: str
    push_flags: tuple[str, str]
    pushed: str
    pushed_kind = "models"

    def __init__(self, folder: Path):
        self.folder = folder

    @abc.abstractmethod
    def flags(self, output: Path | str, source: Path | str | None = None) -> list[str]:
        """Make its arguments, with `folder` or a copy of it as the source."""

    def comparable(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Reduce {path in the output: content} to what two runs have in common."""
        return dict(files)

    def result(self, output: Path) -> dict[str, bytes]:
        """Read what is comparable of a local output folder."""
        return self.comparable(contents(output))


class Tokenizer(Stage):
    """Stage 1, on text files."""

    name = "tokenizer"
    module = "tokenizer_training.train_unigram"
    push_flags = ("--push-to-hub", "alice/tokenizer")
    pushed = "tokenizer.json"

    def flags(self, output: Path | str, source: Path | str | None = None) -> list[str]:
        corpus = f"{source or self.folder}/text.txt"
        return ["--data-files", corpus, "--vocab-size", "400", "--num-workers", "2", "--output-dir", str(output)]


class Shards(Stage):
    """Stage 2, in many partitions."""

    name = "shards"
    module = "tfrecord_prep.prepare_tfrecord_shards"
    push_flags = ("--push-to-hub", "alice/shards")
    pushed = "manifest.json"
    pushed_kind = "datasets"

    def flags(self, output: Path | str, source: Path | str | None = None) -> list[str]:
        source = source or self.folder
        return [
            *("--tokenizer-name-or-path", f"{source}/tokenizer", "--data-files", f"{source}/docs-*.txt"),
            *("--max-length", "16", "--shard-size", "20", "--partition-bytes", "1024", "--num-workers", "2"),
            *("--validation-percent", "20", "--output-dir", str(output)),
        ]


class Training(Stage):
    """Stage 3, with dropout, evaluations and checkpoints."""

    name = "training"
    module = "train.run_mlm"
    push_flags = ("--hub-model-id", "alice/model")
    pushed = "model.safetensors"

    def flags(self, output: Path | str, source: Path | str | None = None) -> list[str]:
        shards = f"{source or self.folder}/shards"
        return [
            *("--preset", "tiny-cpu"),
            *("--config-overrides", MODEL, "--dropout", "0.1"),
            *("--train-dataset", f"{shards}/train", "--eval-dataset", f"{shards}/validation"),
            *("--per-replica-batch-size", "4", "--shuffle-buffer-size", "12", "--max-steps", str(NUM_STEPS)),
            *("--log-steps", "3", "--eval-steps", "4", "--save-steps", "2", "--output-dir", str(output)),
        ]

    def comparable(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Take the newest weights and moments, the exported weights, and the log without figures of the clock."""
        lines = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
        timeless = [{name: value for name, value in line.items() if name not in CLOCK_FIGURES} for line in lines]
        names = (
            max(name for name in files if name.startswith("checkpoints/") and name.endswith(".safetensors")),
            "export/model.safetensors",
        )
        return {name: files[name] for name in names} | {"metrics.jsonl": json.dumps(timeless).encode()}


STAGES = (Tokenizer, Shards, Training)


def write_input(folder: Path) -> None:
    """Write text, a tokenizer and shards, the input of all stages."""
    write_shards(folder)
    draw = random.Random(0)
    for number in range(NUM_FILES):
        lines = (" ".join(draw.choices(WORDS, k=draw.randrange(1, 40))) + "\n" for _ in range(NUM_DOCUMENTS))
        (folder / f"docs-{number}.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "text.txt").write_text("\n".join(generated_lines(NUM_LINES)) + "\n", encoding="utf-8")


def copied(folder: Path, to: Path) -> Path:
    """Copy the input, to be changed."""
    return Path(shutil.copytree(folder, to))


def change_input(folder: Path) -> None:
    """Append a document to the texts, and make the shards again without one."""
    for name in ("text.txt", "docs-0.txt"):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write("a corpus of words\n")
    documents = (folder / "docs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "docs.jsonl").write_text("".join(documents[:-1]), encoding="utf-8")
    assert prepare(flags(folder, folder / "shards", "--validation-percent", "20", "--overwrite")) == 0
