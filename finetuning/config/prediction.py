"""Settings of predict.py and search.py, which use a fine-tuned model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from mlm_common.cli.settings import Bounded, flag, require
from mlm_common.corpus.csv_rows import parse_delimiter


@dataclass(frozen=True)
class PredictionConfig(Bounded):
    """The model, the texts or file to make predictions for, and settings that override the training run's settings."""

    model: str = flag(
        "", "Fine-tuned model: folder of a fine-tuning run or of its export, local or gs://, or a Hub id."
    )
    text: list[str] = flag(list, "Texts to classify or to tag. For tagging, separate words by spaces.")
    text_pair: list[str] = flag(list, "The second text of each pair, if the model was trained on pairs.")
    choices: list[str] = flag(list, "Possible continuations of --text, from which the model chooses one.")
    question: list[str] = flag(list, "Questions about --context.")
    context: str | None = flag(None, "The text with the answers to --question.")
    file: str | None = flag(
        None,
        "File to make predictions for, in a format that the training command reads; labels are not needed. Local or gs://.",
    )
    output: str | None = flag(
        None, "File for the predictions of --file, in the format of the training command. Default: print them."
    )
    delimiter: str | None = flag(
        None, "Character between the columns of a .csv --file. Default: detected from its first rows.", metavar="TEXT"
    )
    text_column_names: list[str] = flag(list, "Columns of --file with the text. Default: as in training.")
    task: str | None = flag(None, "FILE.py:CLASS of a custom task. Default: the task of the training run.")
    max_seq_length: int | None = flag(
        None,
        "Maximum number of tokens per row. Default: as in training; for an export without its run, the model's limit.",
        at_least=1,
    )
    doc_stride: int | None = flag(
        None, "Number of tokens by which two windows of a --context overlap. Default: as in training.", at_least=1
    )
    per_replica_batch_size: int | None = flag(
        None,
        "Rows per batch. Default: as in training; for an export without its run, 32. Lower it if memory runs out.",
        at_least=1,
    )
    null_score_diff_threshold: float | None = flag(
        None,
        'How much higher "no answer" must score than the best answer to be chosen. With a lower value the model '
        "answers fewer questions. Default: as in training; for an export without its run, always answer.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.model), "is required: the folder of a fine-tuning run or of its export", "--model", "nothing")
        sources = {"--text": self.text, "--question": self.question, "--file": self.file}
        given = [name for name, value in sources.items() if value]
        rule = "needs exactly one of --text, --question and --file"
        require(len(given) == 1, rule, "A prediction", " and ".join(given) or "none")
        has_context = not self.question or self.context is not None
        require(has_context, "needs --context, the text with the answer", "--question", "none")
        is_paired = len(self.text_pair) in (0, len(self.text))
        require(is_paired, f"must have one text for each --text ({len(self.text)})", "--text-pair", len(self.text_pair))
        has_beginning = not self.choices or len(self.text) == 1
        require(has_beginning, "needs exactly one --text, which they continue", "--choices", f"{len(self.text)} texts")
        require(self.output is None or self.file is not None, "needs --file", "--output", self.output)
        is_other = self.output is None or os.path.realpath(self.output) != os.path.realpath(str(self.file))
        require(is_other, "must be another file than --file, whose rows it would replace", "--output", self.output)
        parse_delimiter(self.delimiter)
        require(len(self.text_column_names) <= 2, "must be one or two", "--text-column-names", self.text_column_names)
        _check_texts("--text", self.text)
        _check_texts("--text-pair", self.text_pair)
        _check_texts("--choices", self.choices)
        _check_texts("--question", self.question)
        _check_texts("--context", [] if self.context is None else [self.context])


def _check_texts(flag_name: str, texts: Sequence[str]) -> None:
    """Check that no text consists of white space only, because a model would predict something for it, too."""
    for text in texts:
        require(bool(text.strip()), "must not be empty", flag_name, repr(text))


@dataclass(frozen=True)
class SearchConfig(Bounded):
    """The questions, the model, the texts to search, and the folder of their vectors."""

    FLAG_GROUP = "Vectors"

    question: list[str] = flag(
        list,
        "What to search for. Without a question, the texts are only embedded.",
        metavar="QUESTION",
        group="Search",
        is_positional=True,
    )
    model: str = flag(
        "",
        "Model that embeds texts: folder of a run_embedding.py run or of its export, local or gs://, or a Hub id.",
        group="Search",
    )
    corpus: str = flag(
        "",
        "File with the texts, or a quoted glob of such files: .tsv, .csv, .jsonl, .parquet (a text per row) or .txt (a "
        "text per line), also compressed as .gz. Local or gs://.",
        group="Search",
        metavar="FILE",
    )
    delimiter: str | None = flag(
        None,
        "Character between the columns of .csv files. Default: detected from the first rows.",
        group="Search",
        metavar="TEXT",
    )
    text_column_names: list[str] = flag(
        list,
        "Columns with the text; several are joined. Default: the columns title and text, or text alone, or the only "
        "column of text.",
        group="Search",
    )
    top_k: int = flag(10, "Number of texts to show for each question.", group="Search", at_least=1)
    vectors_dir: str | None = flag(
        None, "Folder for the vectors of the texts, local or gs://. Default: the name of --corpus with .vectors added."
    )
    shard_rows: int = flag(
        10_000, "Vectors per file. An interrupted command loses at most one file of vectors.", at_least=1
    )
    overwrite: bool = flag(False, "Replace the vectors of another model or of other texts in the folder.")
    per_replica_batch_size: int = flag(
        64, "Number of texts to embed per batch. Lower it if memory runs out.", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.model), "is required: a model that embeds texts", "--model", "nothing")
        require(bool(self.corpus), "is required: a file with the texts to search", "--corpus", "nothing")
        _check_texts("A question", self.question)
        parse_delimiter(self.delimiter)
        is_named = self.vectors_dir is not None or not any(sign in self.corpus for sign in "*?[")
        require(is_named, "is required if --corpus is a glob", "--vectors-dir", "nothing")

    @property
    def folder(self) -> str:
        return self.vectors_dir or f"{self.corpus}.vectors"
