"""Prepare TFRecord shards: tokenize a corpus, cut it into rows of one length, write them and a manifest.

Each part of the corpus becomes a folder OUTPUT_DIR/SPLIT, which the trainer reads. The corpus is the one the tokenizer
was trained on, unless another is named.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence

from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.manifest import Manifest, read_manifest
from tfrecord_prep.split import SplitPlan, log_first_row, plan_split, prepare_split
from tokenizer_training import storage
from tokenizer_training.command_line import InputError, command, log_start, parse_arguments
from tokenizer_training.corpus import CorpusConfig, corpus_config_from_record, open_corpus
from tokenizer_training.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments (default: those of the process)."""
    corpus_config, config = parse_arguments([CorpusConfig, PrepareConfig], argv, str(__doc__))
    log_start(__file__)
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    corpus = open_corpus(choose_corpus(corpus_config, config.tokenizer_name_or_path))
    plans = [plan_split(name, config, tokenizer, corpus.description) for name in corpus.split_names]
    print(describe_plan(config, plans))
    if config.dry_run:
        return
    for name, plan in zip(corpus.split_names, plans, strict=True):
        if not plan.is_complete:
            prepare_split(plan, corpus.documents(name), tokenizer, config.num_processes)
        log_first_row(plan.folder, tokenizer)
        print(describe_split(plan.folder, read_manifest(plan.folder)))


def choose_corpus(given: CorpusConfig, tokenizer_folder: str) -> CorpusConfig:
    """Return the corpus given, else the one that the tokenizer's `training.json` records.

    Of a recorded corpus everything is taken but its limit, which is the tokenizer's own; flags given win.

    Raises:
        InputError: none was given, and none is recorded.
    """
    if given.is_given:
        return given
    try:
        record = json.loads(storage.read_text(storage.join(tokenizer_folder, "training.json")))["corpus"]
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError) as error:
        raise InputError(
            "A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files; "
            f"{tokenizer_folder} has no training.json that names one."
        ) from error
    given_flags = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(CorpusConfig)
        if getattr(given, field.name) not in (field.default, [])
    }
    chosen = dataclasses.replace(corpus_config_from_record(record), **{"limit": None} | given_flags)
    logger.info("no corpus was named: taking the one the tokenizer was trained on, %s", chosen)
    return chosen


def describe_plan(config: PrepareConfig, plans: Sequence[SplitPlan]) -> str:
    """Return the plan as text."""
    tokenizer = plans[0].settings["tokenizer"]
    lines = [
        f"tokenizer  {config.tokenizer_name_or_path}, vocabulary {tokenizer.vocabulary_size:,}",
        f"rows       {config.max_length} tokens, chunking {config.chunking}, up to {config.shard_size:,} a shard",
        f"workers    {config.num_processes}, {config.partition_bytes:,} bytes of text at a time",
    ]
    states = {True: "complete with these settings, left as it is", False: "to be written"}
    return "\n".join(
        lines + [f"{plan.settings['split']:10s} {plan.folder}: {states[plan.is_complete]}" for plan in plans]
    )


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


if __name__ == "__main__":
    sys.exit(main())
