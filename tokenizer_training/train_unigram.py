"""Stage 1: train a unigram tokenizer on a corpus and save it, with a record of how it was made."""

import json
import logging
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from tokenizer_training import storage
from tokenizer_training.command_line import InputError, command, log_start, parse_arguments
from tokenizer_training.corpus import VALIDATION, Corpus, CorpusConfig, open_corpus
from tokenizer_training.tokenizer import save_tokenizer, tokenizer_sha256
from tokenizer_training.tokenizer_quality import measure_quality
from tokenizer_training.unigram import UnigramConfig, count_words, train_unigram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

RECORD_FILE = "training.json"
TOKENIZER_FILE = "tokenizer.json"
TUTORIAL_REPOSITORY = "unigram-tokenizer-dataset"
PACKAGES = ("mlm-pretraining", "datasets", "sentencepiece", "tokenizers", "transformers")


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
    batch_size: int = field(
        default=1000, metadata={"help": "Documents normalized and counted at a time: more need more memory."}
    )
    push_to_hub: str | None = field(
        default=None, metadata={"help": "Also push the folder to this repository on the Hub (USER/NAME)."}
    )
    export_to_hub: bool = field(
        default=False,
        metadata={"help": f"Also push the folder to the repository {TUTORIAL_REPOSITORY} of the user logged in."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Stop after all checks."})

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
    logger.info("Plan: %s", json.dumps(settings | {"output_dir": output.output_dir, "push_to_hub": repository}))
    if output.dry_run:
        return

    documents = DocumentTally(corpus.documents(corpus_config.split))
    word_counts = count_words(batched(documents, output.batch_size))
    logger.info("Read %s; %s distinct words. Training.", documents, f"{len(word_counts):,}")
    tokenizer = train_unigram(word_counts, unigram_config)
    held_out = measure_held_out(tokenizer, corpus)
    save(tokenizer, output.output_dir, settings | {"input": documents.record(), "held_out": held_out})
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


def check_output_folder(folder: str, settings: dict[str, Any], overwrite: bool) -> None:
    """Refuse a folder with a tokenizer that was made with other settings, unless it may be overwritten.

    Raises:
        InputError: names the settings that differ.
    """
    files = storage.list_files(folder)
    if overwrite or not {RECORD_FILE, TOKENIZER_FILE} & set(files):
        return
    cure = "Give another --output-dir, or --overwrite."
    if RECORD_FILE not in files:
        raise InputError(f"--output-dir {folder} holds a {TOKENIZER_FILE} without a {RECORD_FILE}. {cure}")
    recorded = flat(json.loads(storage.read_text(storage.join(folder, RECORD_FILE))))
    wanted = flat(json.loads(json.dumps(settings)))
    differing = [
        f"{name} {recorded.get(name)!r}, not {value!r}" for name, value in wanted.items() if recorded.get(name) != value
    ]
    if differing:
        raise InputError(f"--output-dir {folder} holds a tokenizer made with {'; '.join(differing)}. {cure}")
    logger.info("%s holds a tokenizer made with the same settings; it will be made again.", folder)


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings, under their dotted names."""
    leaves: dict[str, Any] = {}
    for name, value in record.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves


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


def save(tokenizer: "PreTrainedTokenizerFast", folder: str, record: dict[str, Any]) -> None:
    """Save the tokenizer in the folder, the record of its making last."""
    save_tokenizer(tokenizer, folder)
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    record = record | {"tokenizer_sha256": tokenizer_sha256(tokenizer), "versions": versions}
    storage.write_text(storage.join(folder, RECORD_FILE), json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    logger.info("Saved in %s.", folder)


def push(folder: str, repository: str) -> None:
    """Push the folder to the repository on the Hub."""
    from tokenizer_training.hub import push_folder

    with storage.local_copy(folder) as local_folder:
        push_folder(local_folder, repository, commit_message="Add the tokenizer")
    logger.info("Pushed to %s.", repository)


if __name__ == "__main__":
    sys.exit(main())
