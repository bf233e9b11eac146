r"""Train a unigram tokenizer on a corpus, and save it with a report on its quality and a record of how it was made.

Examples:
    python tokenizer_training/train_unigram.py --data-files 'books/*.txt' \
        --sample-by paragraph --validation-percent 2 --output-dir work/tokenizer
    python tokenizer_training/train_unigram.py --streaming --vocab-size 32000 \
        --dataset-name HuggingFaceFW/fineweb-edu --dataset-config sample-10BT \
        --output-dir work/tokenizer
    python tokenizer_training/train_unigram.py --sources de='books/*.txt' fo=faroese.txt \
        --sampling-alpha 0.3 --validation-percent 1 --output-dir work/tokenizer
"""

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

from mlm_common.cli.console import counted, folder_beside, next_step, progress_bar
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
# A single process reads the text. This process cannot keep more than this number of workers busy.
MAX_COUNTING_PROCESSES = 8

# With fewer words than this, the command warns that the tokens will not fit other text.
FEW_WORDS = 10_000
# For a smaller corpus, the suggested next command makes short rows, which suit a first try.
SMALL_CORPUS_BYTES = 100_000_000

# Waits before the retries of saving. Cloud Storage's client already retries each attempt for two minutes.
SAVE_RETRY_SECONDS = growing_delays(5.0, 5)

RECORDED_PACKAGES = ("mlm-pretraining", "datasets", "numpy", "regex", "sentencepiece", "tokenizers", "transformers")
# The keys of `report.json` that are published. The report's examples are not published, because they are excerpts of
# the text.
PUBLIC_FIGURES = ("vocabulary_size", "pieces", "input", "characters", "held_out", "fit", "sources", "longest_pieces")


@dataclass(frozen=True)
class OutputConfig(Bounded):
    """Where to save the tokenizer, and how to run. No setting here changes the tokenizer.

    Raises:
        InputError: there is no output folder, or a setting is out of range.
    """

    FLAG_GROUP = "Output"

    output_dir: str = flag("", "Folder for the tokenizer, local or gs://.", is_usual=True)
    overwrite: bool = flag(
        False, "Replace a tokenizer in --output-dir that was trained with other settings.", is_usual=True
    )
    num_workers: int | None = flag(
        None,
        "Number of worker processes. The result does not depend on it. Default: one per core, but at most "
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
        None, "Branch to push to. It is created if it does not exist. Default: main.", group="Hub"
    )
    publish_details: bool = flag(
        False,
        "Publish the paths of the corpus (files, folders and buckets) in training.json, and the excerpts of its text "
        "in report.json. Default: they are redacted.",
        group="Hub",
    )
    dry_run: bool = flag(
        False, "Check the flags, the folder and the beginning of the corpus, print the plan, and stop.", is_usual=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output_dir:
            raise InputError("--output-dir is required: the folder of the tokenizer, local or gs://BUCKET/NAME.")
        if self.push_to_hub and self.export_to_hub:
            raise InputError("--push-to-hub cannot be combined with --export-to-hub, because both name a repository.")
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
    """Check the corpus and the output folder, train, measure and save the tokenizer, and push it if requested."""
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
        logger.info("%s already contains this tokenizer. Pass --overwrite to train it again.", output.output_dir)
    else:
        bad_rows = BadRows()
        max_bytes = max_bytes_of(mixture, unigram.max_bytes, alpha)
        samples = {
            name: count_sample(corpus, max_bytes[name], normalization, unigram, output, bad_rows)
            for name, corpus in mixture.corpora.items()
        }
        if bad_rows.num_rows:
            logger.warning("Some rows cannot be read: %s. %s lists them.", bad_rows.describe(), RECORD_FILE)
        if bad_rows.oddities:
            logger.warning("Some documents look like mistakes: %s.", bad_rows.describe_oddities())
        shares = {} if "" in samples else shares_of(mixture, samples, max_bytes, alpha)
        max_characters = unigram.max_distinct_characters
        sample, inputs = combine_samples(samples, shares, max_characters) if shares else (samples[""], {})
        held_out = {name: held_out_text(mixture.corpora[name], samples[name].held_out) for name in samples}
        if (num_words := int(sample.record["num_words"])) < FEW_WORDS:
            logger.warning(
                "There are only %s words to train on, so the tokens will fit this text but hardly any other. Use at "
                "least a megabyte of text, about 150,000 words.",
                f"{num_words:,}",
            )
        tokenizer = train(sample, normalization, unigram)
        report, plot = report_on(tokenizer, sample, held_out, inputs)
        save_with_record(tokenizer, output.output_dir, settings | {"bad_rows": asdict(bad_rows)}, report, plot)
    if repository:
        push_tokenizer(output.output_dir, repository, publish_details=output.publish_details)
    print(describe_next(output.output_dir, mixture))


def check_output_folder(folder: str, settings: dict[str, Any]) -> bool:
    """Return whether a folder contains a complete tokenizer with these settings. Versions of packages may differ.

    Raises:
        InputError: the folder contains a different tokenizer.
    """
    output = open_folder(folder)
    files = output.list_files()
    if not {RECORD_FILE, TOKENIZER_FILE} & set(files):
        return False
    if REPORT_FILE in files and RECORD_FILE not in files:
        logger.info("The run that wrote the tokenizer in %s was killed; training it again.", folder)
        return False
    hint = "Choose another --output-dir, or pass --overwrite to replace it."
    if RECORD_FILE not in files:
        raise InputError(f"{folder} already contains a {TOKENIZER_FILE}, without a {RECORD_FILE}. {hint}")
    with guarded_read(output.path_of(RECORD_FILE), "the record of a tokenizer", hint=hint):
        record = json.loads(output.read_text(RECORD_FILE))
        differences = _differences(record, json.loads(json.dumps(settings)))
        recorded_sha256 = record["tokenizer_sha256"]
    if differences:
        raise InputError(f"The tokenizer in {folder} was trained with other settings: {differences}. {hint}")
    try:
        is_intact = tokenizer_sha256(load_tokenizer(folder)) == recorded_sha256
    except InputError:
        is_intact = False
    if not is_intact:
        logger.warning("The tokenizer in %s is damaged; training it again.", folder)
    return is_intact


def _differences(recorded: dict[str, Any], requested: dict[str, Any]) -> str:
    """Describe how the requested corpus and settings differ from the recorded ones; return "" if they are equal."""
    old, new, has_bad_rows = corpora_of(recorded), corpora_of(requested), recorded["bad_rows"]["num_rows"] > 0
    pairs = [(old[name], new[name]) for name in new if name in old]
    changes = [describe_changes(*corpora, has_bad_rows=has_bad_rows) for corpora in pairs]
    if list(old) != list(new):
        names = [", ".join(filter(None, corpora)) or "none" for corpora in (old, new)]
        changes = ["the sources are {} there, but {} are requested".format(*names)]
    settings = {key: value for key, value in requested.items() if key not in ("corpus", "sources")}
    return "; ".join(filter(None, [*changes, describe_differences(recorded, settings)]))


def find_repository(output: OutputConfig) -> HubRepository | None:
    """Return the repository on the Hub to push to, if any, after checking that it is writable."""
    if not (output.push_to_hub or output.export_to_hub):
        return None
    try:
        repo_id = output.push_to_hub or f"{huggingface_hub.whoami()['name']}/{TUTORIAL_REPOSITORY}"
    except OSError as error:
        message = f"--export-to-hub needs a login on the Hub (`hf auth login`): {' '.join(str(error).split())}"
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
        of_sources = f" of {', '.join(without)}" if any(without) else ""
        lines.append(
            f"note        No text{of_sources} is set aside to evaluate the model on later. Pass --validation-percent 2 "
            "to set some aside."
        )
    return "\n".join(lines)


def describe_corpus(corpus: Corpus) -> str:
    source = short_path(corpus.config.dataset_name or "") or " ".join(map(short_path, corpus.config.data_files))
    num_bytes = [file["num_bytes"] for file in corpus.record.get("data_files", ())]
    files = f" ({counted(len(num_bytes), 'file')}, {sum(num_bytes) / 1e6:,.1f} MB)" if num_bytes else ""
    limit = f", the first {corpus.config.limit:,} documents" if corpus.config.limit else ""
    return f"{source}{files}{limit}; splits: {', '.join(corpus.split_names)}"


def describe_next(output_dir: str, mixture: Mixture) -> str:
    """Return the command that makes shards of the corpus, with short rows if the corpus is small."""
    corpora = mixture.corpora.values()
    sizes = [file["num_bytes"] for corpus in corpora for file in corpus.record.get("data_files", ())]
    is_small = all(corpus.files(corpus.config.split) for corpus in corpora) and sum(sizes) < SMALL_CORPUS_BYTES
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
    """Read a sample of the corpus, and count its words. Rows that are skipped are added to `bad_rows`."""
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
        "Read %s, %.1f MB; training on %s, %.1f MB.",
        counted(int(sample.record["num_documents"]), "document"),
        sample.record["num_bytes"] / 1e6,
        counted(int(sample.record["num_words"]), "word"),
        sample.record["num_sampled_bytes"] / 1e6,
    )
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
    """Choose text to measure the tokenizer on. The tokenizer was trained on this text only if the corpus is too small.

    Args:
        corpus: the corpus.
        held_out: passages that the tokenizer was not trained on.

    Returns:
        The name of the text, and its passages.

    Raises:
        InputError: the validation split has no text.
    """
    split, seed = corpus.config.split, corpus.config.seed
    if VALIDATION in corpus.split_names:
        passages = draw_passages(corpus.sampled_documents(VALIDATION, HELD_OUT_BYTES), seed)
        if not passages:
            raise InputError("A split must have text; `validation` has none. Raise --validation-percent.")
        return VALIDATION, passages
    if held_out:
        return f"{split}, held out", held_out
    return f"{split}, trained on", draw_passages(corpus.documents(split), seed)


def save_with_record(
    tokenizer: "PreTrainedTokenizerFast", folder: str, settings: dict[str, Any], report: dict[str, Any], plot: bytes
) -> None:
    """Save the tokenizer, its report and its plot, and finally the record: settings, hash, and versions of packages.

    Raises:
        RunFailedError: the tokenizer could not be saved. The message names the local folder that keeps it, and says how
            to copy it by hand.
        PermanentError: the tokenizer could not be saved, and a retry would also fail.
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
            output.delete_partial_files()  # a killed run may have left partial files
            output.delete_files([RECORD_FILE])
            output.upload_file(f"{built}/{REPORT_FILE}", REPORT_FILE)  # a report without a record shows a killed run
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
            message = f"The tokenizer could not be written to {built}: {error} Set TMPDIR to another folder."
            raise RunFailedError(message) from error
        copy = f"cp -r {built}/. {shlex.quote(folder)}" if output.is_local else f"gcloud storage cp {built}/* {folder}"
        kind = PermanentError if isinstance(error, InputError) else RunFailedError
        raise kind(
            f"The tokenizer was trained, but could not be saved in {folder}: {error} It is kept in {built}. Copy it by "
            f"hand: {copy}"
        ) from error
    except KeyboardInterrupt:
        logger.warning("The tokenizer is kept in %s.", built)
        raise
    shutil.rmtree(built)
    logger.info("Saved the tokenizer in %s; %s shows how it cuts words.", folder, PLOT_FILE)


def push_tokenizer(folder: str, repository: HubRepository, *, publish_details: bool) -> None:
    """Push the files of a tokenizer's folder, local or `gs://`, that this command wrote, and no other files.

    Args:
        folder: folder of the tokenizer.
        repository: where to push.
        publish_details: whether to push `training.json` and `report.json` without redacting them.

    Raises:
        HubPushError: the push failed.
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
    """Redact the content of `training.json` for publishing."""
    corpora = {name: published_corpus(corpus) for name, corpus in corpora_of(record).items()}
    mixture_settings = {name: record[name] for name in ("source_weights", "sampling_alpha") if name in record}
    return {
        "tokenizer_sha256": record["tokenizer_sha256"],
        **({"corpus": corpora[""]} if "" in corpora else {"sources": corpora}),
        **mixture_settings,
        "bad_rows": published_bad_rows(record["bad_rows"]),
        "normalization": redact_settings(record["normalization"], [NormalizationConfig]),
        "unigram": redact_settings(record["unigram"], [UnigramConfig]),
        "versions": record["versions"],
    }


def published_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the excerpts of the text from the content of `report.json` for publishing."""
    return {name: report[name] for name in PUBLIC_FIGURES if name in report} | {"examples": []}


if __name__ == "__main__":
    run_as_script(main)
