"""Train a unigram tokenizer on a corpus, and save it with a report and a record of how it was made."""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import contextlib
import json
import logging
import platform
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from mlm_common.cli.console import folder_beside, next_step, progress_bar
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import Bounded, describe_differences, flag, flag_of, require
from mlm_common.corpus.config import VALIDATION, CorpusConfig
from mlm_common.corpus.corpus import Corpus
from mlm_common.corpus.identity import describe_changes, published_bad_rows, published_corpus
from mlm_common.corpus.sources import Mixture, corpora_of, open_mixture
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError, PermanentError, RunFailedError, growing_delays, retry_call
from mlm_common.folder_lock import locked_folder
from mlm_common.hub.push import MAIN_BRANCH, HubRepository, check_hub_access, push_files
from mlm_common.hub.redaction import redact_settings
from mlm_common.hub.retries import hub_error
from mlm_common.storage import open_folder, short_path
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import (
    PLOT_FILE,
    RECORD_FILE,
    REPORT_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    load_tokenizer,
    save_tokenizer,
    tokenizer_sha256,
)
from mlm_common.workers import num_cores
from tokenizer_training.config import (
    DEFAULT_VOCABULARY_SIZE,
    NormalizationConfig,
    SampledSourcesConfig,
    UnigramConfig,
)
from tokenizer_training.corpus_sample import (
    HELD_OUT_BYTES,
    CorpusSample,
    combine_samples,
    draw_passages,
    max_bytes_of,
    sample_corpus,
    shares_of,
)
from tokenizer_training.report import report_on
from tokenizer_training.trainer import train_unigram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TUTORIAL_REPOSITORY = "unigram-tokenizer-dataset"
# Reading is one process's work, and keeps no more than these busy.
MAX_COUNTING_PROCESSES = 8

# Text that trains a tokenizer for nothing but itself, and a corpus that suits a first try in short rows.
FEW_WORDS = 10_000
SMALL_CORPUS_BYTES = 100_000_000

# Before each further try to save; Cloud Storage's client itself repeats each for two minutes.
SAVE_RETRY_SECONDS = growing_delays(5.0, 5)

RECORDED_PACKAGES = ("mlm-pretraining", "datasets", "numpy", "regex", "sentencepiece", "tokenizers", "transformers")
# Of `report.json`; its examples are excerpts of the text.
PUBLIC_FIGURES = ("vocabulary_size", "pieces", "input", "characters", "held_out", "fit", "sources", "longest_pieces")


@dataclass(frozen=True)
class OutputConfig(Bounded):
    """Where the tokenizer is saved, and how the run works; nothing here changes the tokenizer.

    Raises:
        InputError: no output folder, or a setting out of its range.
    """

    FLAG_GROUP = "Output"

    output_dir: str = flag("", "Folder for the tokenizer, local or gs://.", is_usual=True)
    overwrite: bool = flag(
        False, "Replace a tokenizer in --output-dir that was trained with other settings.", is_usual=True
    )
    num_workers: int | None = flag(
        None,
        "Number of worker processes; the result does not depend on it. Default: one per core, at most "
        f"{MAX_COUNTING_PROCESSES}.",
        is_usual=True,
        at_least=1,
    )
    batch_size: int | None = flag(None, "Accepted for compatibility; has no effect.")
    push_to_hub: str | None = flag(
        None, "Also push the tokenizer to this repository on the Hub.", metavar="USER/NAME", group="Hub"
    )
    export_to_hub: bool = flag(
        False, f"Also push the tokenizer to your repository {TUTORIAL_REPOSITORY} on the Hub.", group="Hub"
    )
    hub_private: bool = flag(False, "Make the repository private when it is created.", group="Hub")
    hub_revision: str | None = flag(
        None, "Branch to push to; created if it does not exist. Default: main.", group="Hub"
    )
    publish_details: bool = flag(
        False,
        "Do not redact the paths of the corpus (files, folders and buckets) in training.json and the excerpts of "
        "its text in report.json. Default: these are redacted.",
        group="Hub",
    )
    dry_run: bool = flag(False, "Check everything, print the plan, and stop.", is_usual=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output_dir:
            raise InputError("--output-dir is required: the folder of the tokenizer, local or gs://BUCKET/NAME.")
        if self.push_to_hub and self.export_to_hub:
            raise InputError("--push-to-hub cannot be combined with --export-to-hub: both name a repository.")
        for name in ("hub_private", "hub_revision", "publish_details"):
            value, is_pushed = getattr(self, name), bool(self.push_to_hub or self.export_to_hub)
            require(is_pushed or not value, "needs --push-to-hub", flag_of(name), value)


@command
def main(argv: Sequence[str] | None = None) -> None:
    corpus_config, sources, normalization, unigram, output = parse_arguments(
        [CorpusConfig, SampledSourcesConfig, NormalizationConfig, UnigramConfig, OutputConfig],
        argv,
        __doc__,
        needed=("data_files", "output_dir"),
    )
    log_start(__file__)
    open_folder(output.output_dir).check_writable()
    with contextlib.nullcontext() if output.dry_run else locked_folder(output.output_dir):
        make_tokenizer(corpus_config, sources, normalization, unigram, output)


def make_tokenizer(
    corpus_config: CorpusConfig,
    sources: SampledSourcesConfig,
    normalization: NormalizationConfig,
    unigram: UnigramConfig,
    output: OutputConfig,
) -> None:
    """Check the rest, train, measure, save, and push if requested."""
    mixture, alpha = open_mixture(corpus_config, sources), sources.sampling_alpha
    is_needed = alpha is None or ("" not in mixture.corpora and not mixture.weights)
    require(is_needed, "needs --sources without weights", "--sampling-alpha", alpha)
    settings = mixture.record | {"normalization": asdict(normalization), "unigram": asdict(unigram)}
    settings |= {"sampling_alpha": alpha} if sources.sources else {}
    is_complete = not output.overwrite and check_output_folder(output.output_dir, settings)
    repository = find_repository(output)
    print(describe_plan(mixture, unigram, output, repository))
    if output.dry_run:
        return
    if is_complete:
        logger.info("%s already contains this tokenizer; --overwrite trains it again.", output.output_dir)
    else:
        bad_rows = BadRows()
        max_bytes = max_bytes_of(mixture, unigram.max_bytes, alpha)
        samples = {
            name: count_sample(corpus, max_bytes[name], normalization, unigram, output, bad_rows)
            for name, corpus in mixture.corpora.items()
        }
        shares = {} if "" in samples else shares_of(mixture, samples, max_bytes, alpha)
        max_characters = unigram.max_distinct_characters
        sample, inputs = combine_samples(samples, shares, max_characters) if shares else (samples[""], {})
        held_out = {name: held_out_text(mixture.corpora[name], samples[name].held_out) for name in samples}
        if (num_words := int(sample.record["num_words"])) < FEW_WORDS:
            logger.warning(
                "Only %s words to train on: the tokens will fit this text and hardly any other. A megabyte of text, "
                "about 150,000 words, is a start.",
                f"{num_words:,}",
            )
        tokenizer = train(sample, normalization, unigram)
        report, plot = report_on(tokenizer, sample, held_out, inputs)
        save_with_record(tokenizer, output.output_dir, settings | {"bad_rows": asdict(bad_rows)}, report, plot)
    if repository:
        push_tokenizer(output.output_dir, repository, publish_details=output.publish_details)
    print(describe_next(output.output_dir, mixture))


def check_output_folder(folder: str, settings: dict[str, Any]) -> bool:
    """Return whether the folder contains a complete tokenizer of these settings; one of others is an InputError.

    Versions of packages may differ.
    """
    there = open_folder(folder)
    files = there.list_files()
    if not {RECORD_FILE, TOKENIZER_FILE} & set(files):
        return False
    if REPORT_FILE in files and RECORD_FILE not in files:
        logger.info("The run that wrote the tokenizer in %s was killed; training it again.", folder)
        return False
    hint = "Choose another --output-dir, or pass --overwrite to replace it."
    if RECORD_FILE not in files:
        raise InputError(f"{folder} already contains a {TOKENIZER_FILE}, without a {RECORD_FILE}. {hint}")
    with guarded_read(there.path_of(RECORD_FILE), "the record of a tokenizer", hint=hint):
        found = json.loads(there.read_text(RECORD_FILE))
        differences, found_sha256 = _differences(found, json.loads(json.dumps(settings))), found["tokenizer_sha256"]
    if differences:
        raise InputError(f"The tokenizer in {folder} was trained with other settings: {differences}. {hint}")
    try:
        is_whole = tokenizer_sha256(load_tokenizer(folder)) == found_sha256
    except InputError:
        is_whole = False
    if not is_whole:
        logger.warning("The tokenizer in %s is damaged; training it again.", folder)
    return is_whole


def _differences(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """Describe how the corpus and the settings asked for differ from those recorded; empty if they do not."""
    before, now, has_bad_rows = corpora_of(found), corpora_of(asked), found["bad_rows"]["num_rows"] > 0
    both = [(before[name], now[name]) for name in now if name in before]
    changes = [describe_changes(*corpora, has_bad_rows=has_bad_rows) for corpora in both]
    if list(before) != list(now):
        names = [", ".join(filter(None, one)) or "none" for one in (before, now)]
        changes = ["the sources are {} there, {} are asked for".format(*names)]
    others = {key: value for key, value in asked.items() if key not in ("corpus", "sources")}
    return "; ".join(filter(None, [*changes, describe_differences(found, others)]))


def find_repository(output: OutputConfig) -> HubRepository | None:
    """Find the repository on the Hub to push to, if any, and check that it can be written to."""
    if not (output.push_to_hub or output.export_to_hub):
        return None
    try:
        repo_id = output.push_to_hub or f"{huggingface_hub.whoami()['name']}/{TUTORIAL_REPOSITORY}"
    except OSError as error:
        message = f"--export-to-hub needs a login (`hf auth login`): {' '.join(str(error).split())}"
        raise hub_error(message, error) from error
    branch = output.hub_revision or MAIN_BRANCH
    repository = HubRepository(repo_id, private=output.hub_private, branch=branch)
    check_hub_access(repository)
    return repository


def describe_plan(
    mixture: Mixture, unigram: UnigramConfig, output: OutputConfig, repository: HubRepository | None
) -> str:
    size = f"up to {DEFAULT_VOCABULARY_SIZE:,} tokens (depends on the corpus)"
    if unigram.vocab_size is not None:
        size = f"{unigram.vocab_size:,} tokens"
    rare = "byte fallback" if unigram.byte_fallback else "no byte fallback: rare characters become <unk>"
    lines = [
        *(f"{name or 'corpus':11s} {describe_corpus(corpus)}" for name, corpus in mixture.corpora.items()),
        f"tokenizer   unigram, {size}, {rare}",
        f"output      {output.output_dir}" + (f", pushed to {repository.repo_id}" if repository else ""),
    ]
    if without := [name for name, corpus in mixture.corpora.items() if VALIDATION not in corpus.split_names]:
        of = f" of {', '.join(without)}" if any(without) else ""
        lines.append(
            f"note        No text{of} is set aside to measure the model on later: --validation-percent 2 sets some "
            "aside."
        )
    return "\n".join(lines)


def describe_corpus(corpus: Corpus) -> str:
    source = short_path(corpus.config.dataset_name or "") or " ".join(map(short_path, corpus.config.data_files))
    num_bytes = [file["num_bytes"] for file in corpus.record.get("data_files", ())]
    files = f" ({len(num_bytes):,} files, {sum(num_bytes) / 1e6:,.1f} MB)" if num_bytes else ""
    limit = f", the first {corpus.config.limit:,} documents" if corpus.config.limit else ""
    return f"{source}{files}{limit}; splits: {', '.join(corpus.split_names)}"


def describe_next(output_dir: str, mixture: Mixture) -> str:
    """Write the command that makes shards of the corpus: in short rows if the corpus is small, as for a first try."""
    sizes = [file["num_bytes"] for corpus in mixture.corpora.values() for file in corpus.record.get("data_files", ())]
    is_small = all(one.files(one.config.split) for one in mixture.corpora.values()) and sum(sizes) < SMALL_CORPUS_BYTES
    flags = ["--tokenizer-name-or-path", output_dir, "--max-length", "128" if is_small else "512"]
    return next_step(
        "tfrecord_prep/prepare_tfrecord_shards.py", [*flags, "--output-dir", folder_beside(output_dir, "shards")]
    )


def count_sample(
    corpus: Corpus,
    max_bytes: int,
    normalization: NormalizationConfig,
    unigram: UnigramConfig,
    output: OutputConfig,
    bad_rows: BadRows,
) -> CorpusSample:
    """Read a sample of the corpus and count its words; skipped rows are added to `bad_rows`."""
    documents = corpus.sampled_documents(corpus.config.split, max_bytes, bad_rows)
    num_bytes = corpus.num_sampled_bytes(corpus.config.split, max_bytes)
    with progress_bar("Reading and counting", "B", num_bytes) as bar:
        sample = sample_corpus(
            documents,
            normalization,
            max_bytes=max_bytes,
            max_distinct_characters=unigram.max_distinct_characters,
            seed=corpus.config.seed,
            hold_out=VALIDATION not in corpus.split_names,
            num_processes=output.num_workers or min(num_cores(), MAX_COUNTING_PROCESSES),
            on_bytes=bar.update,
        )
    logger.info(
        "Read %s documents, %.1f MB; training on %s words, %.1f MB.",
        f"{sample.record['num_documents']:,}",
        sample.record["num_bytes"] / 1e6,
        f"{sample.record['num_words']:,}",
        sample.record["num_sampled_bytes"] / 1e6,
    )
    if bad_rows.num_rows:
        logger.warning("Rows that cannot be read: %s. See %s.", bad_rows.describe(), RECORD_FILE)
    return sample


def train(
    sample: CorpusSample, normalization: NormalizationConfig, unigram: UnigramConfig
) -> "PreTrainedTokenizerFast":
    with progress_bar("Training", " rounds") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        num_bytes = int(sample.record["num_sampled_bytes"])
        return train_unigram(sample.counts, num_bytes, unigram, normalization, show)


def held_out_text(corpus: Corpus, held_out: list[str]) -> tuple[str, list[str]]:
    """Return a split and text of it to measure on, which was trained on only if the corpus is too small.

    Raises:
        InputError: the validation split has no text.
    """
    split, seed = corpus.config.split, corpus.config.seed
    if VALIDATION in corpus.split_names:
        passages = draw_passages(corpus.sampled_documents(VALIDATION, HELD_OUT_BYTES), seed)
        if not passages:
            raise InputError("A split must hold text; `validation` has none. Raise --validation-percent.")
        return VALIDATION, passages
    if held_out:
        return f"{split}, held out", held_out
    return f"{split}, trained on", draw_passages(corpus.documents(split), seed)


def save_with_record(
    tokenizer: "PreTrainedTokenizerFast", folder: str, settings: dict[str, Any], report: dict[str, Any], plot: bytes
) -> None:
    """Save the tokenizer, its report and plot, and last the record: settings, its hash, versions of packages.

    Raises:
        RunFailedError: it could not be saved; names the local folder that keeps it, and how to copy it by hand.
        PermanentError: the same, where trying again is in vain.
    """
    versions = {"python": platform.python_version()} | {package: version(package) for package in RECORDED_PACKAGES}
    record = settings | {"tokenizer_sha256": tokenizer_sha256(tokenizer), "versions": versions}
    output, built = open_folder(folder), tempfile.mkdtemp(prefix="tokenizer-")
    try:
        files = open_folder(built)
        save_tokenizer(tokenizer, built)
        files.write_json(REPORT_FILE, report)
        files.write_bytes(PLOT_FILE, plot)
        files.write_json(RECORD_FILE, record)

        def save() -> None:
            output.delete_partial_files()  # of a run that was killed
            output.delete_files([RECORD_FILE])
            output.upload_file(f"{built}/{REPORT_FILE}", REPORT_FILE)  # by which a killed run is recognized
            output.upload_folder(built, last=RECORD_FILE)

        retry_call(
            save,
            SAVE_RETRY_SECONDS,
            lambda error: isinstance(error, OSError | RunFailedError),
            on_failure=lambda error, wait_seconds: logger.warning(
                "%s The tokenizer is kept in %s; trying again in %.0f s.", error, built, wait_seconds
            ),
        )
    except (InputError, OSError, RunFailedError) as error:
        if not Path(built, RECORD_FILE).exists():
            shutil.rmtree(built)
            message = f"The tokenizer could not be written to {built}: {error} Set TMPDIR to use another folder."
            raise RunFailedError(message) from error
        copy = f"cp -r {built}/. {shlex.quote(folder)}" if output.is_local else f"gcloud storage cp {built}/* {folder}"
        kind = PermanentError if isinstance(error, InputError) else RunFailedError
        raise kind(
            f"The tokenizer is trained, but could not be saved in {folder}: {error} It is kept in {built}; copy it by "
            f"hand: {copy}"
        ) from error
    except KeyboardInterrupt:
        logger.warning("The tokenizer is kept in %s.", built)
        raise
    shutil.rmtree(built)
    logger.info("Saved the tokenizer in %s; %s shows how it cuts words.", folder, PLOT_FILE)


def push_tokenizer(folder: str, repository: HubRepository, *, publish_details: bool) -> None:
    """Push the files that stage 1 wrote to its folder, local or `gs://`, and no others.

    With `publish_details` it pushes `training.json` and `report.json` as they are.

    Raises:
        HubPushError: it did not succeed.
    """
    output = open_folder(folder)
    summaries = {RECORD_FILE: published_record, REPORT_FILE: published_report}
    names = [name for name in output.list_files() if TOKENIZER_FILES.fullmatch(name)] + [PLOT_FILE, *summaries]
    with output.local_copy(names) as local_folder:
        files: dict[str, Path | bytes] = {name: Path(local_folder, name) for name in names}
        if not publish_details:
            for name, summarize in summaries.items():
                summary = summarize(json.loads(output.read_text(name)))
                files[name] = (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode()
        push_files(files, repository, commit_message="Add the tokenizer", kept_in=folder)


def published_record(record: Mapping[str, Any]) -> dict[str, Any]:
    corpora = {name: published_corpus(corpus) for name, corpus in corpora_of(record).items()}
    mixed = {name: record[name] for name in ("source_weights", "sampling_alpha") if name in record}
    return {
        "tokenizer_sha256": record["tokenizer_sha256"],
        **({"corpus": corpora[""]} if "" in corpora else {"sources": corpora}),
        **mixed,
        "bad_rows": published_bad_rows(record["bad_rows"]),
        "normalization": redact_settings(record["normalization"], [NormalizationConfig]),
        "unigram": redact_settings(record["unigram"], [UnigramConfig]),
        "versions": record["versions"],
    }


def published_report(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in PUBLIC_FIGURES if name in report} | {"examples": []}


if __name__ == "__main__":
    run_as_script(main)
