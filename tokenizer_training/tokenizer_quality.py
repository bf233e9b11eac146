"""How well a tokenizer fits a text."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from tokenizer_training.tokenizer import BYTE_PIECES

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

# Encodings are many times the size of their text, so few texts at a time are held in that form.
TEXTS_AT_ONCE = 64


@dataclass(frozen=True)
class TokenizerQuality:
    """Measured on `num_texts` texts of `num_bytes` bytes of UTF-8 in all; words are what white space separates.

    A rate is a share of all tokens, `unknown_character_rate` one of the characters that are not white space, after
    normalization. Without any tokens or words, the figures per token or word are 0.
    """

    num_texts: int
    num_bytes: int
    num_words: int
    num_tokens: int
    unknown_rate: float
    unknown_character_rate: float
    byte_rate: float
    tokens_per_word: float  # also called fertility
    bytes_per_token: float

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_token:.2f} bytes per token, {self.tokens_per_word:.2f} tokens per word, "
            f"{self.unknown_rate:.3%} of the tokens unknown, {self.byte_rate:.3%} bytes, "
            f"on {self.num_texts:,} texts ({self.num_bytes / 1e6:.1f} MB)"
        )


def measure_quality(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> TokenizerQuality:
    """Return the figures on these texts, read as plain text: what looks like a special token in them is text, too."""
    id_counts = count_ids(tokenizer, texts)
    num_tokens = id_counts.total()
    num_unknown = id_counts[tokenizer.unk_token_id]
    normalizer = tokenizer.backend_tokenizer.normalizer
    normalized = [normalizer.normalize_str(text) for text in texts] if normalizer else texts
    num_unknown_characters = _num_unknown_characters(tokenizer, normalized) if num_unknown else 0
    num_bytes = sum(len(text.encode()) for text in texts)
    num_words = sum(len(text.split()) for text in texts)
    return TokenizerQuality(
        num_texts=len(texts),
        num_bytes=num_bytes,
        num_words=num_words,
        num_tokens=num_tokens,
        unknown_rate=_ratio(num_unknown, num_tokens),
        unknown_character_rate=_ratio(num_unknown_characters, sum(map(_num_visible, normalized))),
        byte_rate=_ratio(sum(id_counts[token_id] for token_id in byte_ids(tokenizer)), num_tokens),
        tokens_per_word=_ratio(num_tokens, num_words),
        bytes_per_token=_ratio(num_bytes, num_tokens),
    )


def plain_text_backend(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Return a copy of the tokenizer, for text as it is: no special tokens found or added, nothing cut or filled."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    backend.encode_special_tokens = True
    return backend


def encode_all(backend: "Tokenizer", texts: Sequence[str]) -> Iterator["Encoding"]:
    """Yield the encoding of each text, without tokens added to it."""
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        yield from backend.encode_batch(texts[start : start + TEXTS_AT_ONCE], add_special_tokens=False)


def count_ids(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> Counter[int]:
    """Return how often each id occurs in the texts, read as plain text."""
    encodings = encode_all(plain_text_backend(tokenizer), texts)
    return Counter(chain.from_iterable(encoding.ids for encoding in encodings))


def byte_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of the pieces that stand for single bytes; none where the model does not fall back to bytes."""
    if not json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("byte_fallback"):
        return set()
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[piece] for piece in BYTE_PIECES if piece in vocabulary}


def _num_unknown_characters(tokenizer: "PreTrainedTokenizerFast", normalized_texts: Sequence[str]) -> int:
    backend = plain_text_backend(tokenizer)
    backend.normalizer = None  # offsets are then those in the normalized text
    unknown_id = tokenizer.unk_token_id
    return sum(
        _num_visible(text[begin:end])
        for text, encoding in zip(normalized_texts, encode_all(backend, normalized_texts), strict=True)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
        if token_id == unknown_id
    )


def _num_visible(text: str) -> int:
    return len("".join(text.split()))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
