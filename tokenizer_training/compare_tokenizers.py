r"""Compare tokenizers on each of your files: tokens per word, bytes per token, and words that they fail to reproduce.

Examples:
    python tokenizer_training/compare_tokenizers.py work/tokenizer \
        FacebookAI/roberta-base --data-files 'my_text/*.txt'
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import Bounded, flag, require
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.storage import output_file
from mlm_common.tokenizer import load_tokenizer, vocabulary_size
from tokenizer_training.corpus_sample import draw_passages
from tokenizer_training.report import encode_all, measure_quality, plain_text_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TITLES = (
    "tokenizer", "vocabulary", "tokens per word", "characters per token", "bytes per token", "unknown", "single bytes",
    "lost words",
)  # fmt: skip


@dataclass(frozen=True)
class CompareConfig(Bounded):
    """Which tokenizers to compare, and on how much text."""

    FLAG_GROUP = "Tokenizers"

    tokenizers: list[str] = flag(
        list,
        "Folders of tokenizers or models, local or gs://, or their names on the Hub.",
        metavar="TOKENIZER",
        is_usual=True,
        is_positional=True,
    )
    max_bytes: int = flag(
        2_000_000, "How many bytes of text to measure on, sampled from all parts of each file.", at_least=1
    )
    output: str | None = flag(None, "Also write all numbers to this .json file, local or gs://.", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.tokenizers), "is required; name one or more", "TOKENIZER", "none")
        require(self.output is None or self.output.endswith(".json"), "must end in .json", "--output", self.output)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Measure each tokenizer on each file, print tables, and write the numbers to a file if requested."""
    config, corpus_config = parse_arguments(
        (CompareConfig, CorpusConfig), argv, __doc__, needed=("tokenizers", "data_files")
    )
    log_start(__file__)
    if config.output is not None:
        folder, name = output_file(config.output, "--output")
    tokenizers = {path: load_tokenizer(path, needs_special_tokens=False) for path in config.tokenizers}
    measures: dict[str, dict[str, dict[str, Any]]] = {}
    for part, texts in texts_by_file(corpus_config, config.max_bytes):
        measures[part] = {path: measure(tokenizer, texts) for path, tokenizer in tokenizers.items()}
        print(table(part, measures[part]), end="\n\n", flush=True)
    if config.output is not None:
        folder.write_json(name, measures)


def texts_by_file(config: CorpusConfig, max_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each file with passages from all its parts; for a data set, the name of the split."""
    corpus = open_corpus(config)
    without_dataset = replace(config, dataset_name=None, dataset_config=None, dataset_revision=None)
    parts = {file.name: replace(without_dataset, data_files=[file.name]) for file in corpus.files(config.split)}
    for part, part_config in (parts or {config.split: config}).items():
        documents = open_corpus(part_config).sampled_documents(config.split, max_bytes)
        yield part, draw_passages(documents, config.seed, max_bytes)


def measure(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> dict[str, Any]:
    """Measure a tokenizer as `train_unigram.py` does, and count the words that change when encoded and decoded."""
    backend = plain_text_backend(tokenizer)
    num_lost = 0
    for text, encoding in zip(texts, encode_all(backend, texts), strict=True):
        decoded = backend.decode(encoding.ids, skip_special_tokens=False)
        num_lost += (Counter(text.split()) - Counter(decoded.split())).total()
    quality = asdict(measure_quality(tokenizer, texts))
    return {
        "vocabulary_size": vocabulary_size(tokenizer),
        **quality,
        "lost_word_rate": num_lost / max(1, quality["num_words"]),
    }


def table(part: str, measures: dict[str, dict[str, Any]]) -> str:
    """Return the measures of all tokenizers on a file as a Markdown table."""
    (num_words,) = {values["num_words"] for values in measures.values()}
    rows = [TITLES, ["---"] + ["---:"] * (len(TITLES) - 1)]
    rows += [
        (
            name,
            f"{values['vocabulary_size']:,}",
            f"{values['tokens_per_word']:.2f}",
            f"{values['characters_per_token']:.2f}",
            f"{values['bytes_per_token']:.2f}",
            *(f"{values[rate]:.2%}" for rate in ("unknown_rate", "byte_rate", "lost_word_rate")),
        )
        for name, values in measures.items()
    ]
    return "\n".join([f"{part}, {num_words:,} words:", "", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    run_as_script(main)
