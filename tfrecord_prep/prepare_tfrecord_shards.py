r"""Prepare TFRecord shards: tokenize a corpus, cut it into rows of equal length, and write them with a manifest.

Each split of the corpus becomes a folder OUTPUT_DIR/SPLIT, which run_mlm.py reads. With several sources the folders are
OUTPUT_DIR/SOURCE/SPLIT, and OUTPUT_DIR/mixture.json lists them. The default corpus is the one that the tokenizer was
trained on. If the command is stopped or killed, run it again: it continues where it stopped.

Examples:
    python tfrecord_prep/prepare_tfrecord_shards.py \
        --tokenizer-name-or-path work/tokenizer --max-length 128 --output-dir work/shards
    python tfrecord_prep/prepare_tfrecord_shards.py \
        --tokenizer-name-or-path FacebookAI/roberta-base --data-files 'my_text/*.txt' \
        --sample-by paragraph --validation-percent 2 --output-dir work/shards
    python tfrecord_prep/prepare_tfrecord_shards.py \
        --tokenizer-name-or-path work/tokenizer --output-dir work/shards --verify
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import contextlib
import dataclasses
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mlm_common.cli.console import folder_beside, next_step
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import flag_of
from mlm_common.corpus.config import BUILTIN, VALIDATION, CorpusConfig, SourcesConfig, corpus_config_from_record
from mlm_common.corpus.corpus import Corpus, open_corpus
from mlm_common.corpus.identity import Part, Record, describe_changed_sources, describe_shared_text, names_its_text
from mlm_common.corpus.sources import Mixture, check_recorded_mixture, corpora_of, open_mixture
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import EXIT_STOPPED, InputError
from mlm_common.folder_lock import locked_folder
from mlm_common.hub.push import MAIN_BRANCH, HubRepository, check_hub_access
from mlm_common.mixture import MIXTURE_NAME, MixtureSource, write_mixture
from mlm_common.storage import open_folder
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import RECORD_FILE, load_tokenizer
from mlm_common.workers import Workers
from tfrecord_prep.config import DATAFLOW_RUNNER, LOCAL_RUNNER, PrepareConfig
from tfrecord_prep.duplicates import FOLDER_NAME as HASHES_NAME
from tfrecord_prep.duplicates import find_duplicates, in_order_of_precedence
from tfrecord_prep.manifest import MANIFEST_NAME, PAIRS, Manifest, read_manifest
from tfrecord_prep.partition import work_on_partition
from tfrecord_prep.split import Engine, SplitPlan, describe_first_row, hash_split, plan_mixture, prepare_split
from tfrecord_prep.verify import split_folders, verify_split

logger = logging.getLogger(__name__)

NUM_BAD_ROWS_SHOWN = 5
WORKERS_HINT = "Use fewer --num-workers, or a smaller --partition-bytes."
# The default length of run_qa.py, which has room for a question and a part of its paragraph.
QUESTION_ANSWERING_LENGTH = 384
# Ten passes over this many rows are 2,000 steps of the smallest preset, which take a few minutes.
MOST_ROWS_READ_TEN_TIMES = 6_400


@command
def main(argv: Sequence[str] | None = None) -> None:
    corpus_config, sources, config = parse_arguments(
        [CorpusConfig, SourcesConfig, PrepareConfig], argv, __doc__, needed=("tokenizer_name_or_path", "output_dir")
    )
    log_start(__file__)
    if config.verify:
        for folder in split_folders(config.output_dir):
            print(verify_split(folder, config.num_processes))
        return
    open_folder(config.output_dir).check_writable()
    lock = contextlib.nullcontext() if config.dry_run else locked_folder(str(config.output_dir))
    with stoppable(), lock, Workers(config.num_processes, WORKERS_HINT) as workers:
        prepare(corpus_config, sources, config, workers)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """On Ctrl-C or SIGTERM print one line and exit with the status of a run that can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED) from None


def prepare(corpus_config: CorpusConfig, sources: SourcesConfig, config: PrepareConfig, workers: Workers) -> None:
    """Check the corpus and the output folder, write the splits, and push them if requested."""
    tokenizer = load_tokenizer(str(config.tokenizer_name_or_path))
    mixture = open_recorded_mixture(corpus_config, sources, str(config.tokenizer_name_or_path))
    output = open_folder(str(config.output_dir))
    if output.exists(MANIFEST_NAME):
        raise InputError(
            f"--output-dir must be the parent of the splits' folders; {output} is the folder of one split. Name its "
            "parent."
        )
    if "" in mixture.corpora and output.exists(MIXTURE_NAME):
        raise InputError(f"{output} contains the shards of several sources. Choose another --output-dir.")
    engines = {name: choose_engine(config, corpus, workers) for name, corpus in mixture.corpora.items()}
    plans = plan_mixture(config, tokenizer, mixture)
    repository = find_repository(config)
    print(describe_plan(config, plans))
    if config.dry_run:
        return
    if not all(plan.is_complete for plan in plans):
        output.delete_files([MIXTURE_NAME] if output.exists(MIXTURE_NAME) else [])
    duplicates = look_for_duplicates(plans, mixture, engines) if config.drop_duplicates else {}
    num_rows = 0
    shown: list[BadRows] = []
    for plan in plans:
        corpus, engine = mixture.corpora[plan.source], engines[plan.source]
        prepare_split(plan, corpus, tokenizer, engine, duplicates.get(plan.folder, {}))
        manifest = read_manifest(plan.folder)
        num_rows += manifest.totals.num_rows if plan.split_name == plans[0].split_name else 0
        if manifest.bad_rows in shown:  # the splits are drawn from the same files
            manifest = dataclasses.replace(manifest, bad_rows=BadRows())
        shown.append(manifest.bad_rows)
        print(describe_split(plan.folder, manifest))
        print(describe_first_row(plan.folder, tokenizer))
    output.subfolder(HASHES_NAME).delete()
    if "" not in mixture.corpora:
        write_mixture(str(output), mixture_sources(mixture))
    if repository is not None:
        from tfrecord_prep.hub_shards import push_shards  # imported here, because each worker imports this module

        folders = [plan.place for plan in plans]
        push_shards(str(output), folders, repository, publish_details=config.publish_details)
    print(describe_next(str(output), plans, num_rows, config.chunking))


def look_for_duplicates(
    plans: Sequence[SplitPlan], mixture: Mixture, engines: Mapping[str, Engine]
) -> dict[str, dict[int, bytes]]:
    """Hash the documents of all splits and find the duplicates.

    Returns:
        The result of `find_duplicates`, by the folder of the split; empty if all splits are already complete.
    """
    if all(plan.is_complete for plan in plans):
        return {}
    plan_of_part = {(plan.source, plan.split_name): plan for plan in plans}
    in_order = [plan_of_part[part] for part in in_order_of_precedence(mixture)]
    paths = {plan.folder: hash_split(plan, mixture.corpora[plan.source], engines[plan.source]) for plan in in_order}
    return find_duplicates(paths)


def mixture_sources(mixture: Mixture) -> dict[str, MixtureSource]:
    """List the folders of the sources, relative to the folder of the mixture."""
    return {
        name: MixtureSource(
            train=f"{name}/{corpus.config.split}",
            validation=f"{name}/{VALIDATION}" if VALIDATION in corpus.split_names[1:] else None,
            weight=mixture.weights.get(name),
        )
        for name, corpus in mixture.corpora.items()
    }


def open_recorded_mixture(given: CorpusConfig, sources: SourcesConfig, tokenizer_folder: str) -> Mixture:
    """Open the corpus or sources that flags name or, if flags name none, the text that the tokenizer was trained on.

    Warns if the tokenizer was trained on text of a validation or test split.

    Raises:
        InputError: no corpus was given, and the tokenizer's record names none or its files have changed. Also any error
            that `open_mixture` raises.
    """
    record = tokenizer_record(tokenizer_folder)
    recorded = corpora_of(record)
    if given.is_given or sources.sources or sources.source_weights:
        mixture = open_mixture(given, sources)
    else:
        to_open: dict[str, Record | None] = {**recorded} or {"": None}
        corpora = {
            name: _reopen_corpus(given, tokenizer_folder, corpus_record, name)
            for name, corpus_record in to_open.items()
        }
        mixture = Mixture(corpora, record.get("source_weights", {}))
    trained_on = [Part(corpus_record, corpus_record["settings"]["split"]) for corpus_record in recorded.values()]
    held_out = [
        (split, Part(corpus.record, split)) for corpus in mixture.corpora.values() for split in corpus.split_names[1:]
    ]
    for split, part in held_out:
        if any(describe_shared_text(trained_part, part) for trained_part in trained_on):
            logger.warning(
                "The tokenizer was trained on documents of the split `%s`, because train_unigram.py was not run with "
                "the same --%s-percent and --seed. Results on that split will be slightly too good.",
                split,
                split,
            )
    return mixture


def _reopen_corpus(given: CorpusConfig, tokenizer_folder: str, record: Record | None, name: str) -> Corpus:
    """Open the corpus that the tokenizer was trained on.

    Flags that are given replace recorded settings. The recorded limit is ignored.
    """
    if record is None or not names_its_text(record):
        raise InputError(
            f"No corpus was given, and {tokenizer_folder} contains no {RECORD_FILE} that names one. Pass --data-files "
            "or --dataset-name (`builtin` needs no download)."
        )
    config = dataclasses.replace(corpus_config_from_record(record), **{"limit": None} | given.settings_given)
    words: list[Any] = []
    for setting, value in config.settings_given.items():
        words += [flag_of(setting), *(value if isinstance(value, list) else [value])]
    as_source = f" as {name}" if name else ""
    logger.info("Using the corpus that the tokenizer was trained on%s: %s", as_source, shlex.join(map(str, words)))
    corpus = open_corpus(config)
    if changes := describe_changed_sources(record, corpus.record):
        raise InputError(
            f"The corpus has changed since the tokenizer in {tokenizer_folder} was trained on it: {changes}. Restore "
            "it, or name the corpus to prepare with --data-files or --dataset-name."
        )
    if corpus.record.get(BUILTIN) != record.get(BUILTIN):
        logger.warning(
            "The built-in text differs from the text that the tokenizer was trained on, because Python or the "
            "installed packages differ."
        )
    return corpus


def tokenizer_record(tokenizer_folder: str) -> Record:
    """Read the record of a tokenizer, which names the tokenizer's training text; empty if there is no record.

    Raises:
        InputError: the record is damaged.
    """
    folder = open_folder(tokenizer_folder)
    if not folder.exists(RECORD_FILE):
        return {}
    path = folder.path_of(RECORD_FILE)
    hint = "Restore it, or delete it and name the corpus with --data-files or --dataset-name."
    with guarded_read(path, "the record of a tokenizer", hint=hint):
        record = dict(json.loads(folder.read_text(RECORD_FILE)))
        check_recorded_mixture(record, path)
    return record


def choose_engine(config: PrepareConfig, corpus: Corpus, workers: Workers) -> Engine:
    if config.runner == LOCAL_RUNNER:
        return lambda work, partitions: workers.map_in_order(partial(work_on_partition, work), partitions)
    from tfrecord_prep.beam_pipeline import check_beam, work_with_beam

    return partial(work_with_beam, options=check_beam(config, corpus))


def find_repository(config: PrepareConfig) -> HubRepository | None:
    """Return the repository on the Hub to push to, if any, after checking that it is writable."""
    if config.push_to_hub is None:
        return None
    branch, private = config.hub_revision or MAIN_BRANCH, config.hub_private
    repository = HubRepository(config.push_to_hub, "dataset", private, branch)
    check_hub_access(repository)
    return repository


def describe_plan(config: PrepareConfig, plans: Sequence[SplitPlan]) -> str:
    fields = plans[0].fields
    workers = "on Dataflow" if config.runner == DATAFLOW_RUNNER else str(config.num_processes)
    size = f"up to {fields['shard_size']:,} per shard"
    lines = [
        f"tokenizer   {config.tokenizer_name_or_path}, {fields['tokenizer']['vocabulary_size']:,} tokens",
        f"rows        {config.max_length} tokens, --chunking {config.chunking}, {size}",
        f"workers     {workers}, each with {fields['partition_bytes'] / 1e6:,.1f} MB of the corpus at a time",
    ]
    if config.push_to_hub:
        lines.append(f"pushed to   {config.push_to_hub}, a data set repository")
    states = {True: "already complete with these settings, left unchanged", False: "to be written"}
    lines += [f"{plan.split_name:11s} {plan.folder}: {states[plan.is_complete]}" for plan in plans]
    if config.max_length < QUESTION_ANSWERING_LENGTH:
        lines.append(
            f"note        Rows of {config.max_length} tokens are short for some fine-tuning: question answering needs "
            f"--max-length {QUESTION_ANSWERING_LENGTH} or more."
        )
    return "\n".join(lines)


def describe_split(folder: str, manifest: Manifest) -> str:
    totals, bad_rows = manifest.totals, manifest.bad_rows
    num_rows, num_padding, num_blank = totals.num_rows, totals.num_padding_tokens, totals.num_blank_documents
    padding = f"{num_padding:,} tokens, {100 * num_padding / (num_rows * manifest.max_length):.2f}%"
    pairs = f"{num_rows:,}, {100 * totals.num_random_pairs / num_rows:.1f}% of them random"
    if totals.num_documents_without_pair:
        pairs += f"; {totals.num_documents_without_pair:,} documents gave none"
    rows = {
        "documents": f"{totals.num_documents - num_blank:,}"
        + (f", {num_blank:,} more were blank" if num_blank else "")
        + (f", {totals.num_duplicate_documents:,} more were duplicates" if manifest.deduplicated else "")
        if totals.num_documents
        else "",
        "skipped": f"rows that cannot be read: {bad_rows.describe(NUM_BAD_ROWS_SHOWN)}" if bad_rows.num_rows else "",
        "tokens": f"{totals.num_tokens:,}",
        "rows": f"{num_rows:,} of {manifest.max_length} tokens",
        "padding": padding if num_padding else "",
        "pairs": pairs if manifest.chunking == PAIRS else "",
        "shards": f"{len(manifest.shards):,}",
        "frequency baseline": f"{manifest.unigram_entropy_nats:.2f}, the loss of guessing by token frequencies alone",
    }
    return "\n".join([f"{manifest.split}: {folder}", *(f"  {name:18s}  {text}" for name, text in rows.items() if text)])


def describe_next(output_dir: str, plans: Sequence[SplitPlan], num_rows: int, chunking: str) -> str:
    """Return the command that trains the smallest preset, which every machine can run, on `num_rows` rows."""
    folders = {plan.split_name: output_dir if plan.source else plan.folder for plan in plans}
    # One pass would be too few steps on a small corpus, and would take days on a large one.
    length = ["--num-epochs", "10"] if num_rows <= MOST_ROWS_READ_TEN_TIMES else ["--max-steps", "1000"]
    flags = ["--preset", "tiny-cpu", *length, "--train-dataset", next(iter(folders.values()))]
    if VALIDATION in folders and plans[0].split_name != VALIDATION:
        flags += ["--eval-dataset", folders[VALIDATION]]
    if chunking == "packed":
        flags.append("--block-attention")
    return next_step("train/run_mlm.py", [*flags, "--output-dir", folder_beside(output_dir, "model")])


if __name__ == "__main__":
    run_as_script(main)
