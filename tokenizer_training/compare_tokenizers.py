"""Compare tokenizers on your text: tokens per word, bytes per token, and what they lose, file by file."""

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
from mlm_common.storage import folder_and_name
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
    """Which tokenizers are compared, on how much text."""

    FLAG_GROUP = "Tokenizers"

    tokenizers: list[str] = flag(
        list,
        "Folders of tokenizers or models, local or gs://, or names on the Hub.",
        metavar="TOKENIZER",
        is_positional=True,
    )
    max_bytes: int = flag(2_000_000, "Bytes of text to measure on, of each file, from all over it.", at_least=1)
    output: str | None = flag(None, "Also write all figures to this .json file, local or gs://.", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.tokenizers), "is required, or several", "TOKENIZER", "none")
        require(self.output is None or self.output.endswith(".json"), "must end in .json", "--output", self.output)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Load the tokenizers, measure each on each file, print tables, and write the file if one is named."""
    config, corpus_config = parse_arguments(
        (CompareConfig, CorpusConfig), argv, __doc__, needed=("tokenizers", "data_files")
    )
    log_start(__file__)
    if config.output is not None:
        folder, name = folder_and_name(config.output)
        folder.check_writable()
    tokenizers = {one: load_tokenizer(one, needs_special_tokens=False) for one in config.tokenizers}
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for part, texts in texts_by_file(corpus_config, config.max_bytes):
        figures[part] = {one: measure(tokenizer, texts) for one, tokenizer in tokenizers.items()}
        print(table(part, figures[part]), end="\n\n", flush=True)
    if config.output is not None:
        folder.write_json(name, figures)


def texts_by_file(config: CorpusConfig, max_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each file of the corpus, or the split of a data set, with passages from all over it."""
    corpus = open_corpus(config)
    alone = replace(config, dataset_name=None, dataset_config=None, dataset_revision=None)
    parts = {file.name: replace(alone, data_files=[file.name]) for file in corpus.files(config.split)}
    for part, of_part in (parts or {config.split: config}).items():
        documents = open_corpus(of_part).sampled_documents(config.split, max_bytes)
        yield part, draw_passages(documents, config.seed, max_bytes)


def measure(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> dict[str, Any]:
    """Measure as `train_unigram.py` reports it, and count the words that encoding and decoding do not give back."""
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


def table(part: str, figures: dict[str, dict[str, Any]]) -> str:
    """Write the figures of a file as a table in Markdown."""
    (num_words,) = {one["num_words"] for one in figures.values()}
    rows = [TITLES, ["---"] + ["---:"] * (len(TITLES) - 1)]
    rows += [
        (
            name,
            f"{one['vocabulary_size']:,}",
            f"{one['tokens_per_word']:.2f}",
            f"{one['characters_per_token']:.2f}",
            f"{one['bytes_per_token']:.2f}",
            *(f"{one[rate]:.2%}" for rate in ("unknown_rate", "byte_rate", "lost_word_rate")),
        )
        for name, one in figures.items()
    ]
    return "\n".join([f"{part}, {num_words:,} words:", "", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    run_as_script(main)
