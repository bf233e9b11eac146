"""Stage 1: train a unigram tokenizer on a corpus and save it, with a record of how it was made."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from mlm_common.command_line import command, log_start, parse_arguments
from mlm_common.errors import InputError
from mlm_common.hub.push import HubRepository, push_folder
from mlm_common.progress import progress_bar
from mlm_common.storage import open_folder
from mlm_common.worker_pool import num_cores
from tokenizer_training.corpus.config import VALIDATION, CorpusConfig
from tokenizer_training.corpus.corpus import Corpus, open_corpus
from tokenizer_training.training_record import check_output_folder, save_with_record
from tokenizer_training.unigram.config import DEFAULT_VOCABULARY_SIZE, UnigramConfig
from tokenizer_training.unigram.corpus_sample import (
    HELD_OUT_BYTES,
    CorpusSample,
    SampleLimits,
    draw_passages,
    sample_corpus,
)
from tokenizer_training.unigram.normalization import NormalizationConfig
from tokenizer_training.unigram.report import build_report, draw_report, measure_quality, render_report
from tokenizer_training.unigram.trainer import train_unigram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TUTORIAL_REPOSITORY = "unigram-tokenizer-dataset"
# Reading is one process's work, and keeps no more than these busy.
MAX_COUNTING_PROCESSES = 8


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
    num_workers: int | None = field(
        default=None,
        metadata={
            "help": "Processes that count words. The tokenizer is the same for any number. Default: one per core, at "
            f"most {MAX_COUNTING_PROCESSES}."
        },
    )
    batch_size: int | None = field(
        default=None, metadata={"help": "Accepted and without effect: text is counted in blocks of 4 MiB."}
    )
    push_to_hub: str | None = field(
        default=None, metadata={"help": "Also push the folder to this repository on the Hub (USER/NAME)."}
    )
    export_to_hub: bool = field(
        default=False,
        metadata={"help": f"Also push the folder to the repository {TUTORIAL_REPOSITORY} of the user logged in."},
    )
    hub_private: bool = field(
        default=False, metadata={"help": "Make the repository that is pushed to private when it is created."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Stop after all checks, with the plan printed."})

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise InputError("--output-dir is required: the folder of the tokenizer, local or gs://BUCKET/NAME.")
        if self.num_workers is not None and self.num_workers < 1:
            raise InputError(f"--num-workers must be 1 or more processes; got {self.num_workers}.")
        if self.push_to_hub and self.export_to_hub:
            raise InputError("--push-to-hub and --export-to-hub both name a repository on the Hub; give one of them.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Train a unigram tokenizer and save it in `--output-dir`."""
    corpus_config, normalization, unigram_config, output = parse_arguments(
        [CorpusConfig, NormalizationConfig, UnigramConfig, OutputConfig], argv, __doc__
    )
    log_start(__file__)
    open_folder(output.output_dir).check_writable()
    corpus = open_corpus(corpus_config)
    settings = {
        "corpus": corpus.description,
        "normalization": asdict(normalization),
        "unigram": asdict(unigram_config),
    }
    check_output_folder(output.output_dir, settings, output.overwrite)
    repository = find_repository(output)
    print(describe_plan(corpus, unigram_config, output, repository))
    if output.dry_run:
        return

    sample = read(corpus, normalization, unigram_config, output)
    tokenizer = train(sample, normalization, unigram_config)
    part, texts = held_out_texts(sample, corpus)
    report = build_report(
        tokenizer, measure_quality(tokenizer, texts), part, texts, sample.counts.characters, sample.record
    )
    print(render_report(report))
    save_with_record(tokenizer, output.output_dir, settings, report, draw_report(report, tokenizer, texts))
    if repository:
        push(output.output_dir, repository)


def read(
    corpus: Corpus, normalization: NormalizationConfig, unigram_config: UnigramConfig, output: OutputConfig
) -> CorpusSample:
    """Return the counted sample of the corpus, read behind a progress bar."""
    max_bytes, seed = unigram_config.max_bytes, corpus.config.seed
    documents = corpus.sampled_documents(corpus.config.split, max_bytes, seed)
    num_bytes = corpus.num_sampled_bytes(corpus.config.split, max_bytes, seed)
    with progress_bar("Reading and counting", "B", num_bytes) as bar:
        sample = sample_corpus(
            documents,
            normalization,
            SampleLimits(max_bytes, unigram_config.max_distinct_characters, seed),
            output.num_workers or min(num_cores(), MAX_COUNTING_PROCESSES),
            hold_out=VALIDATION not in corpus.split_names,
            on_bytes=bar.update,
        )
    logger.info(
        "Read %s documents, %.1f MB; training on %.1f MB of them, %s words, %s different segments.",
        f"{sample.record['num_documents']:,}",
        sample.record["num_bytes"] / 1e6,
        sample.record["num_sampled_bytes"] / 1e6,
        f"{sample.record['num_words']:,}",
        f"{sample.record['num_distinct_segments']:,}",
    )
    return sample


def train(
    sample: CorpusSample, normalization: NormalizationConfig, unigram_config: UnigramConfig
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer trained on the sample, behind a progress bar."""
    with progress_bar("Training", " rounds") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        num_bytes = int(sample.record["num_sampled_bytes"])
        return train_unigram(sample.counts, num_bytes, unigram_config, normalization, show)


def held_out_texts(sample: CorpusSample, corpus: Corpus) -> tuple[str, list[str]]:
    """Return passages to measure on and where they are from: not trained on, unless the corpus is too small."""
    seed = corpus.config.seed
    if VALIDATION in corpus.split_names:
        return VALIDATION, draw_passages(corpus.sampled_documents(VALIDATION, HELD_OUT_BYTES, seed), seed)
    if sample.held_out:
        return f"{corpus.config.split}, held out", sample.held_out
    return f"{corpus.config.split}, trained on", draw_passages(corpus.documents(corpus.config.split), seed)


def describe_plan(
    corpus: Corpus, unigram: UnigramConfig, output: OutputConfig, repository: HubRepository | None
) -> str:
    """Return the plan as text."""
    source = corpus.config.dataset_name or " ".join(corpus.config.data_files)
    num_bytes = [file["num_bytes"] for file in corpus.description.get("data_files", ())]
    files = f" ({len(num_bytes):,} files, {sum(num_bytes) / 1e6:,.1f} MB)" if num_bytes else ""
    limit = f", the first {corpus.config.limit:,} documents" if corpus.config.limit else ""
    size = (
        f"{unigram.vocab_size:,}" if unigram.vocab_size else f"as the corpus allows, up to {DEFAULT_VOCABULARY_SIZE:,},"
    )
    lines = [
        f"corpus      {source}{files}{limit}; splits: {', '.join(corpus.split_names)}",
        f"tokenizer   unigram, {size} pieces, character coverage {unigram.character_coverage}, "
        + ("rarer characters as bytes" if unigram.byte_fallback else "rarer characters lost"),
        f"output      {output.output_dir}" + (f", pushed to {repository.repo_id}" if repository else ""),
    ]
    return "\n".join(lines)


def find_repository(output: OutputConfig) -> HubRepository | None:
    """Return the repository on the Hub to push to, if any, after checking that it can be written to."""
    if not (output.push_to_hub or output.export_to_hub):
        return None
    from huggingface_hub import whoami

    from mlm_common.hub.access import check_hub_access

    try:
        repo_id = output.push_to_hub or f"{whoami()['name']}/{TUTORIAL_REPOSITORY}"
    except OSError as error:
        raise InputError(f"--export-to-hub needs a login (`hf auth login`): {' '.join(str(error).split())}") from error
    repository = HubRepository(repo_id, private=output.hub_private)
    check_hub_access(repository)
    return repository


def push(folder: str, repository: HubRepository) -> None:
    """Push the folder to the repository on the Hub."""
    with open_folder(folder).local_copy() as local_folder:
        push_folder(local_folder, repository, commit_message="Add the tokenizer", kept_in=folder)


if __name__ == "__main__":
    sys.exit(main())
