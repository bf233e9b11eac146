"""Prepare TFRecord shards: tokenize a corpus, cut it into rows of one length, write them and a manifest.

Each part of the corpus becomes a folder OUTPUT_DIR/SPLIT, which the trainer reads. The corpus is the one the tokenizer
was trained on, unless another is named.
"""

import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from mlm_common.command_line import command, log_start, parse_arguments
from mlm_common.errors import InputError
from mlm_common.hub.push import HubRepository
from mlm_common.storage import open_folder
from mlm_common.worker_pool import map_in_order
from tfrecord_prep.config import DATAFLOW_RUNNER, LOCAL_RUNNER, PrepareConfig
from tfrecord_prep.manifest import Manifest, read_manifest
from tfrecord_prep.partition import SplitWork, work_on_partition
from tfrecord_prep.push_to_hub import push_shards
from tfrecord_prep.split import Engine, SplitPlan, log_first_row, plan_splits, prepare_split
from tfrecord_prep.split_folder import PartitionResult, finish_folder
from tfrecord_prep.tokenizer_corpus import tokenizer_corpus, warn_of_seen_splits
from tfrecord_prep.verify import verify_folder
from tokenizer_training.corpus.config import CorpusConfig
from tokenizer_training.corpus.corpus import Corpus, Partition, open_corpus
from tokenizer_training.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments (default: those of the process)."""
    corpus_config, config = parse_arguments([CorpusConfig, PrepareConfig], argv, str(__doc__))
    log_start(__file__)
    if config.verify:
        print(verify_folder(config.output_dir, config.num_processes))
        return
    open_folder(config.output_dir).check_writable()
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    seen = tokenizer_corpus(config.tokenizer_name_or_path)
    corpus = open_corpus(choose_corpus(corpus_config, seen, config.tokenizer_name_or_path))
    warn_of_seen_splits(corpus.config, seen)
    engine = choose_engine(config, corpus)
    plans = plan_splits(config, tokenizer, corpus)
    repository = find_repository(config)
    print(describe_plan(config, plans))
    if config.dry_run:
        return
    for plan in plans:
        if plan.is_complete:
            finish_folder(plan.folder)
        else:
            prepare_split(plan, corpus, tokenizer, engine)
        log_first_row(plan.folder, tokenizer)
        print(describe_split(plan.folder, read_manifest(plan.folder)))
    if repository is not None:
        push_shards(str(config.output_dir), [plan.split_name for plan in plans], repository)


def find_repository(config: PrepareConfig) -> HubRepository | None:
    """Return the repository on the Hub to push to, if any, after checking that it can be written to.

    Raises:
        InputError: it cannot.
    """
    if config.push_to_hub is None:
        return None
    from mlm_common.hub.access import check_hub_access

    repository = HubRepository(config.push_to_hub, kind="dataset", private=config.hub_private)
    check_hub_access(repository)
    return repository


def choose_corpus(given: CorpusConfig, seen: CorpusConfig | None, tokenizer_folder: str) -> CorpusConfig:
    """Return the corpus given, else the one `seen` by the tokenizer in its training.

    Of a recorded corpus everything is taken but its limit, which is the tokenizer's own; flags given win.

    Raises:
        InputError: none was given, and none is recorded.
    """
    if given.is_given:
        return given
    if seen is None:
        raise InputError(
            "A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files; "
            f"{tokenizer_folder} has no training.json that names one."
        )
    given_flags = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(CorpusConfig)
        if getattr(given, field.name) not in (field.default, [])
    }
    chosen = dataclasses.replace(seen, **{"limit": None} | given_flags)
    logger.info("no corpus was named: taking the one the tokenizer was trained on, %s", chosen)
    return chosen


def choose_engine(config: PrepareConfig, corpus: Corpus) -> Engine:
    """Return what works on the partitions with `config.runner`.

    Raises:
        InputError: what `check_beam` raises.
    """
    if config.runner == LOCAL_RUNNER:
        return partial(work_locally, num_processes=config.num_processes)
    from tfrecord_prep.beam_pipeline import check_beam, work_with_beam

    return partial(work_with_beam, options=check_beam(config, corpus))


def describe_plan(config: PrepareConfig, plans: Sequence[SplitPlan]) -> str:
    """Return the plan as text."""
    fields = plans[0].fields
    workers = "Dataflow's" if config.runner == DATAFLOW_RUNNER else str(config.num_processes)
    lines = [
        f"tokenizer  {config.tokenizer_name_or_path}, vocabulary {fields['tokenizer']['vocabulary_size']:,}",
        f"rows       {config.max_length} tokens, chunking {config.chunking}, up to {config.shard_size:,} a shard",
        f"workers    {workers}, {fields['partition_bytes']:,} bytes of the corpus at a time",
    ]
    states = {True: "complete with these settings, left as it is", False: "to be written"}
    if config.push_to_hub:
        lines.append(f"pushed to  {config.push_to_hub}, a data set repository")
    return "\n".join(lines + [f"{plan.split_name:10s} {plan.folder}: {states[plan.is_complete]}" for plan in plans])


def describe_split(folder: str, manifest: Manifest) -> str:
    """Return a split's counts as text."""
    totals = manifest.totals
    padding_percent = 100 * totals.num_padding_tokens / (totals.num_rows * manifest.max_length)
    return "\n".join(
        [
            f"{manifest.split}: {folder}",
            f"  documents        {totals.num_documents:,}, of which {totals.num_blank_documents:,} blank and skipped",
            f"  tokens           {totals.num_tokens:,}",
            f"  rows             {totals.num_rows:,} of {manifest.max_length} tokens",
            f"  padding          {totals.num_padding_tokens:,} tokens, {padding_percent:.3f} %",
            f"  shards           {len(manifest.shards):,}",
            f"  unigram entropy  {manifest.unigram_entropy_nats:.3f} nats, the loss of knowing frequencies only",
        ]
    )


def work_locally(
    work: SplitWork, partitions: Iterable[tuple[int, Partition]], num_processes: int
) -> Iterator[PartitionResult]:
    """Yield the result of each numbered partition, in order; one process means this one.

    Raises:
        InputError: what `work_on_partition` raises, or a worker was killed.
    """
    cure = "Give fewer --num-workers, or a smaller --partition-bytes."
    yield from map_in_order(partial(work_on_partition, work), partitions, num_processes, cure)


if __name__ == "__main__":
    sys.exit(main())
