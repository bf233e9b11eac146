"""Install the project, then train a tiny model on text and let it fill in words, with the four commands a user types.

    make quickstart
    python3 quickstart.py

It needs nothing but Python. The output of the commands goes to OUTPUT_DIR/*.log; only their results are shown.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import install

OUTPUT_FOLDER = "runs/quickstart"
NUM_STEPS = 600
SENTENCE = "Return a list of strings."
SHOW_TOKENS = (
    "import sys; from tokenizers import Tokenizer as T; "
    "print(*T.from_file(sys.argv[1]).encode(sys.argv[2], add_special_tokens=False).tokens)"
)
NUM_COLUMNS = 100
NUM_PREDICTIONS = 3


class QuickStart:
    """The stages of the quickstart. Each stage runs a command and shows its result.

    Args:
        folder: the folder for all results and logs.
        num_steps: number of training steps.

    Attributes:
        python: interpreter that runs the commands.
    """

    def __init__(self, folder: Path, num_steps: int):
        self._folder = folder
        self._num_steps = num_steps
        self.python = sys.executable

    def train_tokenizer(self) -> None:
        """Train the tokenizer, and show a sentence cut into its tokens."""
        with stage("2/4  Tokenizer: learns 4,096 tokens from the docstrings of your Python packages"):
            self._run(
                *("tokenizer_training/train_unigram.py", "--dataset-name", "builtin", "--validation-percent", "2"),
                *("--vocab-size", "4096", "--max-bytes", "4000000", "--output-dir", self._path("tokenizer")),
            )
        num_bytes = self._read("tokenizer/report.json")["input"]["num_bytes"]
        command = [self.python, "-c", SHOW_TOKENS, self._path("tokenizer/tokenizer.json"), SENTENCE]
        tokens = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout.strip()
        say(f'read {num_bytes / 1e6:.0f} MB of text. "{SENTENCE}" becomes {tokens}')

    def write_shards(self) -> None:
        """Write the shards, and show the first row."""
        with stage("3/4  Shards: cuts the text into rows of 64 tokens, 2% of it for validation"):
            log = self._run(
                *("tfrecord_prep/prepare_tfrecord_shards.py", "--tokenizer-name-or-path", self._path("tokenizer")),
                *("--max-length", "64", "--output-dir", self._path("shards")),
            )
        num_rows = [self._read(f"shards/{split}/manifest.json")["totals"]["num_rows"] for split in SPLITS]
        first_row = re.search(r"first row.*?(\[CLS\].+)", log.read_text(encoding="utf-8"))
        example = f" The first starts: {first_row[1]}" if first_row else ""
        say(
            textwrap.shorten(
                f"{num_rows[0]:,} rows to train on, {num_rows[1]:,} to validate.{example}", 90, placeholder=" …"
            )
        )

    def train_model(self) -> None:
        """Train the model, and show how its loss falls."""
        baseline = self._read("shards/validation/manifest.json")["unigram_entropy_nats"]
        lines: list[dict[str, Any]] = []

        def show_new_losses() -> str:
            all_lines = self._metrics()
            for line in all_lines[len(lines) :]:
                if line["split"] == "validation":
                    show_line(f"step {line['step']:>6,}   validation loss {line['loss']:.2f}")
            lines[:] = all_lines
            return install.last_line(self._log("train/run_mlm.py"))

        with stage(f"4/4  Training: a ModernBERT of 1.7 million parameters, {self._num_steps:,} steps"):
            say(f"loss of guessing from word frequencies alone: {baseline:.2f}")
            self._run(
                *("train/run_mlm.py", "--preset", "tiny-cpu", "--train-dataset", self._path("shards/train")),
                *("--eval-dataset", self._path("shards/validation"), "--max-steps", str(self._num_steps)),
                *("--output-dir", self._path("model")),
                status=show_new_losses,
            )
            show_new_losses()
        last = next(line for line in reversed(lines) if line["split"] == "validation")
        gain = baseline - last["loss"]
        # Without context, a model can only copy the tenth of the masked tokens that stays visible.
        uses_context = gain > 0.1 * baseline + 0.3
        context = f", {gain:.2f} below guessing: learned from context" if uses_context else ""
        say(f"validation loss {last['loss']:.2f} (perplexity {math.exp(last['loss']):.0f}){context}")

    def fill_masks(self) -> None:
        """Fill three masks, and show the most likely words."""
        print("\nWhat the model fills in for [MASK]:", flush=True)
        log = self._run("train/fill_mask.py", "--model", self._path("model/export"))
        filled = read_predictions(log.read_text(encoding="utf-8"))
        width = max(len(sentence) for sentence, _ in filled)
        for sentence, predictions in filled:
            words = "   ".join(f"{token} {percentage:.0f}%" for percentage, token in predictions[:NUM_PREDICTIONS])
            print(f"{sentence:<{width}}   {words}")

    def _run(self, script: str, *flags: str, status: Callable[[], str] | None = None) -> Path:
        log = self._log(script)
        install.run_with_progress([self.python, script, *flags], log, status)
        return log

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def _log(self, script: str) -> Path:
        return install.PROJECT_FOLDER / self._folder / f"{Path(script).stem}.log"

    def _read(self, name: str) -> Any:
        return json.loads((install.PROJECT_FOLDER / self._folder / name).read_text(encoding="utf-8"))

    def _metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the training log so far, without an incomplete last line."""
        path = install.PROJECT_FOLDER / self._folder / "model" / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]


SPLITS = ("train", "validation")


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Print the title of a stage and, at its end, how long it took."""
    print(title, flush=True)
    started_seconds = time.monotonic()
    yield
    say(f"done in {time.monotonic() - started_seconds:.0f} s")


def say(text: str) -> None:
    """Print a text below the title of a stage, wrapped and indented."""
    for paragraph in text.splitlines():
        print(
            textwrap.fill(paragraph, NUM_COLUMNS, initial_indent=install.INDENT, subsequent_indent=install.INDENT),
            flush=True,
        )


def show_line(text: str) -> None:
    """Print a line that replaces the progress of the running command."""
    print(("\r\033[K" if sys.stdout.isatty() else "") + install.INDENT + text, flush=True)


def read_predictions(text: str) -> list[tuple[str, list[tuple[float, str]]]]:
    """Parse the output of fill_mask.py, and return [(sentence, [(percentage, token)])]."""
    filled: list[tuple[str, list[tuple[float, str]]]] = []
    for line in text.splitlines():
        prediction = re.match(r"\s*([\d.]+)%\s+(.*)", line)
        if prediction and filled:
            filled[-1][1].append((float(prediction[1]), prediction[2].strip()))
        elif "[MASK]" in line:
            filled.append((line.strip(), []))
    return filled


def closing_lines(folder: Path, python: str) -> str:
    """Return the last lines to print: where the results are, and which commands to type next."""
    activate = Path(python).parent / "activate"
    if install.PROJECT_FOLDER in activate.parents:
        activate = activate.relative_to(install.PROJECT_FOLDER)
    return f"""
The model is in {folder}/model/export, the plot of its loss in {folder}/model/loss.png.
Next, activate the environment and ask the model something else:

    source {shlex.quote(str(activate))}
    python train/fill_mask.py --model {folder}/model --text "Return the [MASK] of a file."

Then train on your own text: README.md, "Your own text"."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output-dir", default=OUTPUT_FOLDER, metavar="DIR", help="Folder for all results (%(default)s)."
    )
    parser.add_argument(
        "--max-steps", type=int, default=NUM_STEPS, metavar="N", help="Number of training steps (%(default)s)."
    )
    parser.add_argument("--environment", metavar="DIR", help="Environment to install into. Default: .venv.")
    parser.add_argument(
        "--python", metavar="FILE", help="Use this interpreter, which has the packages, and install nothing."
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages."""
    arguments = build_parser().parse_args(argv)
    quick_start = QuickStart(Path(arguments.output_dir), arguments.max_steps)
    try:
        with stage("1/4  Packages"):
            quick_start.python = arguments.python or install.install(
                install.find_extra(), arguments.environment, say=say
            )
        quick_start.train_tokenizer()
        quick_start.write_shards()
        quick_start.train_model()
        quick_start.fill_masks()
    except (ValueError, install.InstallError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        return 130
    print(closing_lines(Path(arguments.output_dir), quick_start.python))
    return 0


if __name__ == "__main__":
    sys.exit(main())
