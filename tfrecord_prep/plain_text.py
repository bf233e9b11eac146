"""Tokenize documents as plain text: what reads like a special token in them is text, too."""

import functools
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokenizer_training.passages import grouped_by_size

# Encodings are many times the size of their text, so few documents at a time are held in that form.
ENCODED_AT_ONCE_BYTES = 1 << 20
# A noncharacter of Unicode, which stands for nothing in text.
_NOT_IN_TEXT = "\U0010ffff"


def plain_text_tokenizer_json(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` with the same ids, whose special tokens no text can produce.

    `encode_special_tokens` of the library does less: a unigram model holds its special tokens among its pieces, and
    goes on finding them in text. Here they get names that text does not contain.
    """
    settings = json.loads(tokenizer_json)
    special_tokens = {token["content"] for token in settings["added_tokens"] if token["special"]}

    def renamed(token: str) -> str:
        return _NOT_IN_TEXT + token if token in special_tokens else token

    for token in settings["added_tokens"]:
        token["content"] = renamed(token["content"])
    model = settings["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(token): index for token, index in vocabulary.items()}
    else:
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = renamed(model["unk_token"])
    settings["truncation"] = settings["padding"] = settings["post_processor"] = None
    return json.dumps(settings, ensure_ascii=False)


def encode_documents(tokenizer_json: str, documents: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids of all documents, one after the other, (num_ids,), and ids per document, (num_documents,).

    Args:
        tokenizer_json: what `plain_text_tokenizer_json` returned.
        documents: texts, none of them blank.
    """
    tokenizer = _tokenizer(tokenizer_json)
    ids = [np.empty(0, np.int32)]
    lengths: list[int] = []
    for group in grouped_by_size(documents, ENCODED_AT_ONCE_BYTES):
        encodings = tokenizer.encode_batch_fast(group, add_special_tokens=False)
        ids.extend(np.array(encoding.ids, np.int32) for encoding in encodings)
        lengths.extend(len(encoding) for encoding in encodings)
    return np.concatenate(ids), np.array(lengths, np.int64)


@functools.lru_cache(maxsize=1)
def _tokenizer(tokenizer_json: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)
