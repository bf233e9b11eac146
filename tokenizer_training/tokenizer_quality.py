"""How well a tokenizer fits a text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_DOCUMENTS = 1000
MAX_BYTES = 2_000_000


@dataclass(frozen=True)
class TokenizerQuality:
    """Measured on `num_documents` documents of `num_bytes` bytes of UTF-8 in all."""

    num_documents: int
    num_bytes: int
    num_tokens: int
    unknown_rate: float
    tokens_per_word: float  # words are what white space separates; also called fertility
    bytes_per_token: float

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_token:.2f} bytes per token, {self.tokens_per_word:.2f} tokens per word, "
            f"{self.unknown_rate:.3%} unknown, on {self.num_documents:,} documents ({self.num_bytes / 1e6:.1f} MB)"
        )


def measure_quality(tokenizer: "PreTrainedTokenizerFast", documents: Iterable[str]) -> TokenizerQuality | None:
    """Return the figures on the first 1,000 documents that are not blank, or 2 MB of them; None if there are none."""
    from tokenizers import Tokenizer

    texts = list(_head(islice(filter(str.strip, documents), MAX_DOCUMENTS)))
    if not texts:
        return None
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # a text that mentions <unk> has no unknown token for it
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    num_tokens = sum(len(encoding) for encoding in encodings)
    num_unknown = sum(encoding.ids.count(tokenizer.unk_token_id) for encoding in encodings)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_words = sum(len(text.split()) for text in texts)
    return TokenizerQuality(
        num_documents=len(texts),
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        unknown_rate=num_unknown / num_tokens,
        tokens_per_word=num_tokens / num_words,
        bytes_per_token=num_bytes / num_tokens,
    )


def _head(texts: Iterable[str]) -> Iterator[str]:
    num_bytes = 0
    for text in texts:
        yield text
        num_bytes += len(text.encode())
        if num_bytes >= MAX_BYTES:
            return
