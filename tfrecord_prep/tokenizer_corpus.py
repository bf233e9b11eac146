"""The corpus that a tokenizer was trained on, by the `training.json` beside it."""

import json
import logging

from mlm_common.errors import InputError
from mlm_common.storage import files as storage
from tokenizer_training.corpus.config import HELD_OUT_PARTS, CorpusConfig, corpus_config_from_record

logger = logging.getLogger(__name__)


def tokenizer_corpus(tokenizer_folder: str) -> CorpusConfig | None:
    """Return the settings of the corpus that the tokenizer was trained on, None where no `training.json` tells.

    Raises:
        InputError: it has settings that this version does not know.
    """
    try:
        record = json.loads(storage.read_text(storage.join(tokenizer_folder, "training.json")))["corpus"]
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        return None
    return corpus_config_from_record(record)


def warn_of_seen_parts(corpus: CorpusConfig, seen: CorpusConfig | None) -> None:
    """Log a warning where a part that is not for training has documents that the tokenizer was trained on."""
    for part in seen_parts(corpus, seen) if seen else []:
        logger.warning(
            "The tokenizer was trained on documents of the part `%s`, since train-unigram was not given the same "
            "--%s-percent and --seed: what is measured on that part will look a little too good.",
            part,
            part,
        )


def seen_parts(corpus: CorpusConfig, seen: CorpusConfig) -> list[str]:
    """Return the drawn parts of a corpus of which documents were in the main part of the corpus `seen`.

    The parts are drawn one after the other from the same number of each document (see `drawn_part`).
    """
    if _main_text(corpus) != _main_text(seen):
        return []
    unseen_percent = sum(map(seen.percent_of, HELD_OUT_PARTS)) if corpus.seed == seen.seed else 0.0
    parts: list[str] = []
    percent = 0.0
    for part in HELD_OUT_PARTS:
        percent += corpus.percent_of(part)
        if corpus.percent_of(part) and percent > unseen_percent:
            parts.append(part)
    return parts


def _main_text(corpus: CorpusConfig) -> tuple[object, ...]:
    return corpus.dataset_name, corpus.dataset_config, corpus.data_files, corpus.split
