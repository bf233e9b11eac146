"""The corpus that a tokenizer was trained on, by the `training.json` beside it."""

import json
import logging

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from tokenizer_training.corpus.config import HELD_OUT_SPLITS, CorpusConfig, corpus_config_from_record
from tokenizer_training.tokenizer import RECORD_FILE

logger = logging.getLogger(__name__)


def tokenizer_corpus(tokenizer_folder: str) -> CorpusConfig | None:
    """Return the settings of the corpus that the tokenizer was trained on, None where no `training.json` tells.

    Raises:
        InputError: it has settings that this version does not know.
    """
    try:
        record = json.loads(open_folder(tokenizer_folder).read_text(RECORD_FILE))["corpus"]
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        return None
    return corpus_config_from_record(record)


def warn_of_seen_splits(corpus: CorpusConfig, seen: CorpusConfig | None) -> None:
    """Log a warning where a split that is not for training has documents that the tokenizer was trained on."""
    for split in seen_splits(corpus, seen) if seen else []:
        logger.warning(
            "The tokenizer was trained on documents of the split `%s`, since train-unigram was not given the same "
            "--%s-percent and --seed: what is measured on that split will look a little too good.",
            split,
            split,
        )


def seen_splits(corpus: CorpusConfig, seen: CorpusConfig) -> list[str]:
    """List the drawn splits of a corpus of which documents were in the main split of the corpus `seen`.

    The splits are drawn one after the other from the same number of each document (see `draw_split`).
    """
    if _main_text(corpus) != _main_text(seen):
        return []
    unseen_percent = sum(map(seen.percent_of, HELD_OUT_SPLITS)) if corpus.seed == seen.seed else 0.0
    splits: list[str] = []
    percent = 0.0
    for split in HELD_OUT_SPLITS:
        percent += corpus.percent_of(split)
        if corpus.percent_of(split) and percent > unseen_percent:
            splits.append(split)
    return splits


def _main_text(corpus: CorpusConfig) -> tuple[object, ...]:
    return corpus.dataset_name, corpus.dataset_config, corpus.data_files, corpus.split
