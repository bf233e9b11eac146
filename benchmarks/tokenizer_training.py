"""Compare stage 1 with the trainers of `tokenizers` and SentencePiece, and measure how its memory scales (Linux).

    python benchmarks/tokenizer_training.py --train-file train.jsonl.gz --valid-file valid.jsonl.gz

Each run is a new process. The results are medians: seconds, and the megabytes of all processes together. `ours` is the
whole command, which reads the original files; the other trainers get the paragraphs in a text file. Quality is measured
in the same way for all, on the paragraphs of the validation file. Memory is measured on generated text (see
generated_text.py).
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.generated_text import write_generated_text
from benchmarks.measuring.measured_run import MeasuredRun, run_and_tell
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.text_files import ByteRange, find_files, read_byte_range
from mlm_common.tokenizer import load_tokenizer
from tokenizer_training.config import NormalizationConfig, make_normalizer, make_pre_tokenizer
from tokenizer_training.corpus_sample import draw_passages
from tokenizer_training.report import TokenizerQuality, measure_quality

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROJECT = Path(__file__).resolve().parents[1]
OURS, TEXT_PIECES_ONLY = "ours", "ours, no byte fallback"
BARE_TRAINER, SENTENCEPIECE = "UnigramTrainer", "SentencePiece"
OUR_COMMAND = str(PROJECT / "tokenizer_training" / "train_unigram.py")
PEER_COMMAND = str(PROJECT / "benchmarks" / "peers" / "tokenizer_peers.py")
PEERS_HEADER = "trainer|runs|seconds|(from-to)|peak MB|pieces|bytes/token|tokens/word|unknown|bytes|"
MEMORY_HEADER = "text MB|reading s|training s|all s|MB/s|reading MB|training MB|peak MB|/first|processes"


@dataclass
class Contender:
    """A trainer. `command` makes its command from a vocabulary size and an output path; `load` loads its output."""

    name: str
    num_repeats: int
    command: Callable[[int, str], list[str]]
    load: Callable[[str], "PreTrainedTokenizerFast"]


def our_command(files: Iterable[str], valid_files: Iterable[str], vocab_size: int, output: str) -> list[str]:
    """Make the command of stage 1."""
    flags = ["--data-files", *files, "--vocab-size", str(vocab_size), "--output-dir", output]
    return [sys.executable, OUR_COMMAND, *flags, *(f"--validation-files={file}" for file in valid_files)]


def contenders(
    train_file: str, valid_file: str, text_file: str, num_repeats: int, num_trainer_repeats: int
) -> list[Contender]:
    """List our trainer, which reads the corpus, and the other trainers, which read its paragraphs from a text file."""
    ours = partial(our_command, [train_file], [valid_file])

    def peer(name: str) -> Callable[[int, str], list[str]]:
        return lambda size, output: [sys.executable, PEER_COMMAND, name, text_file, str(size), output]

    return [
        Contender(OURS, num_repeats, ours, load_tokenizer),
        Contender(
            TEXT_PIECES_ONLY, 1, lambda size, output: [*ours(size, output), "--no-byte-fallback"], load_tokenizer
        ),
        Contender(BARE_TRAINER, num_trainer_repeats, peer("unigram-trainer"), load_backend),
        Contender(SENTENCEPIECE, num_repeats, peer("sentencepiece"), load_sentencepiece),
    ]


def load_backend(path: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer in a `tokenizer.json`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path, unk_token="<unk>")


def load_sentencepiece(path: str) -> "PreTrainedTokenizerFast":
    """Load the pieces of a SentencePiece model into a tokenizer that cuts text into words as ours does."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = SentencePieceProcessor(model_file=path)
    scores = [(model.id_to_piece(index), model.get_score(index)) for index in range(len(model))]
    backend = Tokenizer(models.Unigram(scores, unk_id=model.unk_id()))
    backend.normalizer = make_normalizer(NormalizationConfig())
    backend.pre_tokenizer = make_pre_tokenizer(NormalizationConfig())
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=model.id_to_piece(model.unk_id()))


@dataclass
class Result:
    """The runs of a contender with one vocabulary size, and the quality of its tokenizer, if it wrote one."""

    runs: list[MeasuredRun] = field(default_factory=list)
    num_pieces: int = 0
    quality: TokenizerQuality | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> float:
        return statistics.median(run.peak.num_bytes for run in self.runs)

    @property
    def failure(self) -> str:
        """The word to print if any run failed. A Rust program that stops on an error panics."""
        failed = [run for run in self.runs if run.status]
        return "" if not failed else "PANICKED" if any("panicked" in run.output for run in failed) else "FAILED"


def paragraphs(file: str) -> Iterable[str]:
    """Yield the lines of all documents, except blank lines."""
    (stored,) = find_files([file], "--valid-file")
    for document in read_byte_range(ByteRange(stored), CorpusConfig()):
        yield from filter(str.strip, document.splitlines())


def compare_with_peers(arguments: argparse.Namespace) -> None:
    """Run all contenders in turn, and print a table for each vocabulary size."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        text_file = Path(folder, "train.txt")
        with text_file.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{paragraph}\n" for paragraph in paragraphs(arguments.train_file))
        num_bytes = text_file.stat().st_size
        by_size = {
            size: contenders(
                arguments.train_file, arguments.valid_file, str(text_file), arguments.repeats, arguments.trainer_repeats
            )
            for size in arguments.vocab_sizes
        }
        results = run_in_turns(by_size, draw_passages(paragraphs(arguments.valid_file), seed=0), folder)
    for size in arguments.vocab_sizes:
        print(f"\nVocabulary {size:,}, {num_bytes / 1e6:.1f} MB of text")
        print_peers(results[size])


def run_in_turns(
    by_size: dict[int, list[Contender]], texts: Sequence[str], folder: str
) -> dict[int, dict[str, Result]]:
    """Return the results by vocabulary size and contender. Quality is measured on `texts`; outputs go to the folder."""
    results = {size: {each.name: Result() for each in each_size} for size, each_size in by_size.items()}
    turns = [(size, each) for size, each_size in by_size.items() for each in each_size]
    for repeat in range(max(each.num_repeats for _, each in turns)):
        for size, contender in turns:
            if repeat < contender.num_repeats:
                output = f"{folder}/{contender.name}-{size}-{repeat}"
                run = run_and_tell(f"{contender.name}, {size:,}", contender.command(size, output))
                result = results[size][contender.name]
                result.runs.append(run)
                if not run.status:
                    tokenizer = contender.load(output)
                    result.num_pieces = len(tokenizer)
                    result.quality = measure_quality(tokenizer, texts)
                elif contender.name in (OURS, TEXT_PIECES_ONLY):
                    sys.exit("Ours failed.")
    return results


def print_peers(results: dict[str, Result]) -> None:
    """Print a row for each contender, and the ratios to the other trainers."""
    print_table(PEERS_HEADER, [peer_row(name, result) for name, result in results.items() if result.runs])
    ours = results[OURS]
    peers = [results[name] for name in (BARE_TRAINER, SENTENCEPIECE)]
    completed = [peer for peer in peers if peer.runs and not peer.failure]
    if completed:
        print(f"time of ours / faster peer          {ours.seconds / min(peer.seconds for peer in completed):.2f}")
    if results[BARE_TRAINER].runs:
        print(f"memory of ours / UnigramTrainer     {ours.peak_bytes / results[BARE_TRAINER].peak_bytes:.2f}")
    if best := results[SENTENCEPIECE].quality:
        for name in (OURS, TEXT_PIECES_ONLY):
            if quality := results[name].quality:
                ratio = quality.bytes_per_token / best.bytes_per_token
                print(f"bytes/token / SentencePiece's       {ratio:.4f} ({name})")


def peer_row(name: str, result: Result) -> list[str]:
    """Make the cells of a contender's row."""
    seconds = [run.seconds for run in result.runs]
    measured = [str(len(seconds)), *median_and_range(seconds, ".1f")]
    quality = ["-"] * 5
    if scores := result.quality:
        rates = f"{scores.unknown_rate:.3%}", f"{scores.byte_rate:.3%}"
        quality = [f"{result.num_pieces:,}", f"{scores.bytes_per_token:.4f}", f"{scores.tokens_per_word:.4f}", *rates]
    return [name, *measured, f"{result.peak_bytes / 1e6:,.0f}", *quality, result.failure]


def show_memory(arguments: argparse.Namespace) -> None:
    """Run our command on increasing amounts of generated text, and print a table."""
    vocab_size = arguments.vocab_sizes[0]
    rows: list[list[str]] = []
    first_peak_bytes = 0
    for num_megabytes in arguments.generated_megabytes:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            text_file = Path(folder, "text.txt")
            write_generated_text(text_file, int(num_megabytes * 1e6))
            run = run_and_tell(
                f"{num_megabytes:g} MB", our_command([str(text_file)], [], vocab_size, f"{folder}/tokenizer")
            )
        if run.status:
            sys.exit(run.output)
        first_peak_bytes = first_peak_bytes or run.peak.num_bytes
        rows.append(memory_row(num_megabytes, run, first_peak_bytes))
    print(f"\nMemory of ours on generated text, vocabulary {vocab_size:,}")
    print_table(MEMORY_HEADER, rows)


def memory_row(num_megabytes: float, run: MeasuredRun, first_peak_bytes: int) -> list[str]:
    """Make the cells of a row: seconds and peak memory of each phase, and each process's memory at the peak."""
    reading, training = run.seconds_of_line(r"Reading and counting\.$"), run.seconds_of_line(r"Training\.$")
    peaks = [
        max((sample.num_bytes for sample in run.samples if start <= sample.seconds < end), default=0)
        for start, end in ((reading, training), (training, run.seconds))
    ]
    seconds = [f"{value:.1f}" for value in (training - reading, run.seconds - training, run.seconds)]
    num_bytes = [f"{value / 1e6:,.0f}" for value in (*peaks, run.peak.num_bytes)]
    ratio = f"{run.peak.num_bytes / first_peak_bytes:.2f}"
    processes = "+".join(f"{value / 1e6:.0f}" for value in run.peak.process_bytes)
    return [f"{num_megabytes:g}", *seconds, f"{num_megabytes / run.seconds:.1f}", *num_bytes, ratio, processes]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-file", help="Corpus with the key or column `text`, such as .jsonl.gz.")
    parser.add_argument("--valid-file", help="Corpus of the same form, to measure quality on.")
    parser.add_argument("--only", choices=("peers", "memory"), help="The part to run. Default: both.")
    parser.add_argument(
        "--vocab-sizes", type=int, nargs="+", default=[16_000, 32_000], help="The first is used for memory."
    )
    parser.add_argument("--repeats", type=int, default=3, help="Runs of our trainer and of SentencePiece.")
    parser.add_argument("--trainer-repeats", type=int, default=3, help="Runs of the UnigramTrainer, which is slow.")
    parser.add_argument("--generated-megabytes", type=float, nargs="+", default=[30, 100, 300, 1000])
    arguments = parser.parse_args()
    if arguments.only != "memory" and not (arguments.train_file and arguments.valid_file):
        parser.error("--train-file and --valid-file are required, except with --only memory")
    print_machine()
    if arguments.only != "memory":
        compare_with_peers(arguments)
    if arguments.only != "peers":
        show_memory(arguments)


if __name__ == "__main__":
    main()
