"""Stage 1: train a unigram tokenizer on a corpus and save it, with a record of how it was made."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from tokenizer_training import storage
from tokenizer_training.command_line import InputError, command, log_start, parse_arguments
from tokenizer_training.corpus import VALIDATION, Corpus, CorpusConfig, open_corpus
from tokenizer_training.tokenizer_quality import measure_quality
from tokenizer_training.training_record import check_output_folder, save_with_record
from tokenizer_training.unigram import UnigramConfig, count_words, train_unigram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TUTORIAL_REPOSITORY = "unigram-tokenizer-dataset"


@dataclass(frozen=True)
class OutputConfig:
    """Where the tokenizer goes, and how the run is carried out; none of it changes the tokenizer.

    Raises:
        InputError: no output folder, or a setting out of its range.
    """

    output_dir: str = field(default="", metadata={"help": "Folder of the tokenizer, local or gs://. Required."})
    overwrite: bool = field(
        default=False, metadata={"help": "Replace a tokenizer in --output-dir that was made otherwise."}
    )
    batch_size: int = field(default=1000, metadata={"help": "Documents normalized and counted at a time."})
    push_to_hub: str | None = field(
        default=None, metadata={"help": "Also push the folder to this repository on the Hub (USER/NAME)."}
    )
    export_to_hub: bool = field(
        default=False,
        metadata={"help": f"Also push the folder to the repository {TUTORIAL_REPOSITORY} of the user logged in."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Stop after all checks, with the plan printed."})

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise InputError("--output-dir is required: the folder of the tokenizer, local or gs://BUCKET/NAME.")
        if self.batch_size < 1:
            raise InputError(f"--batch-size must be 1 or more documents; got {self.batch_size}.")
        if self.push_to_hub and self.export_to_hub:
            raise InputError("--push-to-hub and --export-to-hub both name a repository on the Hub; give one of them.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Train a unigram tokenizer and save it in `--output-dir`."""
    corpus_config, unigram_config, output = parse_arguments([CorpusConfig, UnigramConfig, OutputConfig], argv, __doc__)
    log_start(__file__)
    corpus = open_corpus(corpus_config)
    settings = {"corpus": corpus.description, "unigram": asdict(unigram_config)}
    check_output_folder(output.output_dir, settings, output.overwrite)
    repository = find_repository(output)
    print(describe_plan(corpus, unigram_config, output, repository))
    if output.dry_run:
        return

    documents = DocumentTally(corpus.documents(corpus_config.split))
    word_counts = count_words(batched(documents, output.batch_size))
    logger.info("Read %s; %s distinct words. Training.", documents, f"{len(word_counts):,}")
    tokenizer = train_unigram(word_counts, unigram_config)
    held_out = measure_held_out(tokenizer, corpus)
    save_with_record(tokenizer, output.output_dir, settings | {"input": documents.record(), "held_out": held_out})
    if repository:
        push(output.output_dir, repository)


class DocumentTally:
    """The documents, once, behind a progress bar, with their number and size counted on the way."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.num_documents = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        from tqdm import tqdm

        for text in tqdm(self._documents, desc="Reading", unit=" documents", disable=None):
            self.num_documents += 1
            self.num_bytes += len(text.encode())
            yield text

    def __str__(self) -> str:
        return f"{self.num_documents:,} documents, {self.num_bytes / 1e6:.1f} MB"

    def record(self) -> dict[str, int]:
        """Return the counts, for the record of the training."""
        return {"num_documents": self.num_documents, "num_bytes": self.num_bytes}


def batched(documents: Iterable[str], batch_size: int) -> Iterator[list[str]]:
    """Yield the documents in lists of `batch_size`, the last one perhaps shorter."""
    iterator = iter(documents)
    while batch := list(islice(iterator, batch_size)):
        yield batch


def describe_plan(corpus: Corpus, unigram: UnigramConfig, output: OutputConfig, repository: str | None) -> str:
    """Return the plan as text."""
    source = corpus.config.dataset_name or " ".join(corpus.config.data_files)
    num_bytes = [file["num_bytes"] for file in corpus.description.get("data_files", ())]
    files = f" ({len(num_bytes):,} files, {sum(num_bytes) / 1e6:,.1f} MB)" if num_bytes else ""
    limit = f", the first {corpus.config.limit:,} documents" if corpus.config.limit else ""
    lines = [
        f"corpus      {source}{files}{limit}; parts: {', '.join(corpus.split_names)}",
        f"tokenizer   unigram, {unigram.vocab_size:,} pieces, character coverage {unigram.character_coverage}",
        f"output      {output.output_dir}" + (f", pushed to {repository}" if repository else ""),
    ]
    return "\n".join(lines)


def find_repository(output: OutputConfig) -> str | None:
    """Return the repository on the Hub to push to, if any, after checking that it can be written to."""
    if not (output.push_to_hub or output.export_to_hub):
        return None
    from huggingface_hub import whoami

    from tokenizer_training.hub import check_hub_access

    try:
        repository = output.push_to_hub or f"{whoami()['name']}/{TUTORIAL_REPOSITORY}"
    except OSError as error:
        raise InputError(f"--export-to-hub needs a login (`hf auth login`): {' '.join(str(error).split())}") from error
    check_hub_access(repository)
    return repository


def measure_held_out(tokenizer: "PreTrainedTokenizerFast", corpus: Corpus) -> dict[str, Any]:
    """Return the figures on the validation part, or, where that is missing or blank, on the head of the main part."""
    parts = [name for name in (VALIDATION, corpus.config.split) if name in corpus.split_names]
    for part in parts:
        quality = measure_quality(tokenizer, corpus.documents(part))
        if quality is not None:
            logger.info("Measured on %s: %s.", part, quality)
            return {"part": part} | asdict(quality)
    raise InputError("A corpus must hold text; every document is blank.")


def push(folder: str, repository: str) -> None:
    """Push the folder to the repository on the Hub."""
    from tokenizer_training.hub import push_folder

    with storage.local_copy(folder) as local_folder:
        push_folder(local_folder, repository, commit_message="Add the tokenizer")
    logger.info("Pushed to %s.", repository)


if __name__ == "__main__":
    sys.exit(main())
