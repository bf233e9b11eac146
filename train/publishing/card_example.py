"""Choose the example sentence of a model card: a sentence of the validation text with one word masked.

A sentence of a corpus is published only if the corpus is known to be public.
"""

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.identity import hub_dataset
from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage import read_file
from mlm_common.tokenizer import special_ids
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.records import decode_feature, read_records
from tfrecord_prep.segment_pairs import sentences_of
from train.config.settings import MASK

logger = logging.getLogger(__name__)

# Example for the built-in corpus, which consists of Python docstrings.
BUILTIN_EXAMPLE = f"Return a {MASK} of strings."
# Shown if no sentence of the corpus may be published.
PLACEHOLDER = f"Replace this text with a sentence with one {MASK}."
NUM_ROWS = 200
MIN_CHARACTERS, MAX_CHARACTERS = 25, 100
# A word of at least four letters.
WORD = regex.compile(r"(?<!\p{L})\p{L}{4,}+")
# Letters, spaces and the usual punctuation: no numbers, addresses or markup.
PLAIN_SENTENCE = regex.compile(r"[\p{Lu}\p{Lo}][\p{L}\p{M} ,;:'\u2019-]+\p{STerm}")
TIMEOUT_SECONDS = 10


def example_of(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return a sentence with one mask for a run's card; None if there is no sentence that may be published."""
    hub = record["settings"]["hub"]
    if hub["hub_example"] is not None:
        return hub["hub_example"]
    corpus = (record["eval_data"] or {}).get("corpus") or {}
    if corpus.get("settings", {}).get("dataset_name") == BUILTIN:
        return BUILTIN_EXAMPLE
    if hub["hub_model_id"] is not None and not is_public(hub_dataset(corpus)):
        return None
    path = record["settings"].get("data", {}).get("eval_dataset")
    return _first_example(path, tokenizer) if path else None


@functools.lru_cache(maxsize=8)
def is_public(dataset: str | None) -> bool:
    """Return whether anyone may read a data set on the Hub: whether it is visible without a token and not gated."""
    from huggingface_hub import HfApi, constants

    if dataset is None or constants.HF_HUB_OFFLINE:
        return False
    try:
        info = HfApi(token=False).dataset_info(dataset, timeout=TIMEOUT_SECONDS)
    except Exception as error:  # whatever the reason, the data set is not known to be public
        logger.debug("%s is not known to be public: %s", dataset, error)
        return False
    return not info.private and not info.gated


@functools.lru_cache(maxsize=8)
def _first_example(folder: str, tokenizer: PreTrainedTokenizerFast) -> str | None:
    try:
        records = read_records(read_file(open_shards(folder).paths[0]))
        rows = (decode_feature(record, "input_ids") for record in itertools.islice(records, NUM_ROWS))
        return find_example(rows, tokenizer)
    except (InputError, RunFailedError, OSError, ValueError, IndexError, KeyError) as error:
        logger.debug("no example from %s: %s", folder, error)
        return None


def find_example(rows: Iterable[NDArray[np.integer]], tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Find the first plain sentence in rows of token ids, and return it with its longest one-token word masked.

    Sentences with `<unk>`, and sentences without a one-token word, are skipped; None if no sentence is left.
    """
    for row in rows:
        for text in _documents(row, tokenizer):
            # A row may start or end within a sentence, but `PLAIN_SENTENCE` rejects most fragments.
            for sentence in sentences_of(text, "punctuation"):
                if masked := _masked(sentence, tokenizer):
                    return masked
    return None


def _documents(row: NDArray[np.integer], tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield the decoded text between special tokens of a row; skip stretches that contain `<unk>`."""
    ids = special_ids(tokenizer)
    unknown = ids.pop("unk")
    is_text = ~np.isin(row, list(ids.values()))
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], is_text, [False]]).astype(np.int8)))
    for begin, end in bounds.reshape(-1, 2):
        # Skip a stretch at the start of the row, which may start within a word.
        if begin > 0 and unknown not in row[begin:end]:
            yield tokenizer.decode(row[begin:end], clean_up_tokenization_spaces=False)


def _masked(sentence: str, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Mask the longest one-token word of a sentence; None if it has no such word, or is not plain."""
    if not MIN_CHARACTERS <= len(sentence) <= MAX_CHARACTERS or not PLAIN_SENTENCE.fullmatch(sentence):
        return None
    ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
    words = (word.span() for word in WORD.finditer(sentence, 1))  # from 1: never mask the first word
    for begin, end in sorted(words, key=lambda span: span[0] - span[1]):
        text = f"{sentence[:begin]}{tokenizer.mask_token}{sentence[end:]}"
        masked = tokenizer(text, add_special_tokens=False)["input_ids"]
        changed = [new for old, new in zip(ids, masked, strict=False) if old != new]
        if len(masked) == len(ids) and changed == [tokenizer.mask_token_id]:
            return f"{sentence[:begin]}{MASK}{sentence[end:]}"
    return None
