"""Report on a tokenizer, so that its user can judge it: figures and examples, as JSON and as text."""

import json
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

from mlm_common.tokenizer import (
    BYTE_TOKENS,
    UNUSED_TOKEN,
    plain_text_tokenizer_json,
    special_token_ids,
    vocabulary_size,
)

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

Item = TypeVar("Item")

# Encodings are many times the size of their text, so few are kept at a time.
TEXTS_AT_ONCE = 64
NUM_DROPPED_SHOWN = 20
NUM_LONGEST = 20
NUM_EXAMPLES = 10
NUM_EXAMPLES_SHOWN = 3
EXAMPLE_CHARACTERS = 80
LINE_COLUMNS = 120
LABEL_COLUMNS = 12


@dataclass(frozen=True)
class TokenizerQuality:
    """Measured on `num_texts` texts of `num_bytes` bytes of UTF-8 in all; words are separated by white space.

    Rates are fractions of all tokens; `unknown_character_rate` is one of the characters that are not white space,
    after normalization. Without any tokens or words, the figures per token or word are 0.
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
    """Measure the tokenizer on plain texts: what looks like a special token in them is text, too."""
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


def build_report(
    tokenizer: "PreTrainedTokenizerFast",
    quality: TokenizerQuality,
    source: str,
    texts: Sequence[str],
    character_counts: Mapping[str, int],
    input_record: dict[str, Any],
) -> dict[str, Any]:
    """Build the report, of values that JSON has; a function of the arguments.

    Args:
        tokenizer: the one that was trained.
        quality: its figures on held-out text.
        source: the split of the corpus that the held-out text comes from, human-readable.
        texts: that text; examples of segmentations come from all over it.
        character_counts: of the corpus, after normalization. A character is kept if it is a token: only then is it
            never unknown or spelled in bytes.
        input_record: what the tokenizer was trained on; becomes part of the report.
    """
    kinds = tokens_by_kind(tokenizer)
    ordinary = kinds["single_character"] + kinds["other"]
    return {
        "vocabulary_size": vocabulary_size(tokenizer),
        "pieces": {f"num_{kind}": len(pieces) for kind, pieces in kinds.items()},
        "input": input_record,
        "characters": _characters(tokenizer, character_counts),
        "held_out": {"part": source} | asdict(quality),
        "longest_pieces": sorted(ordinary, key=lambda piece: (-len(piece), piece))[:NUM_LONGEST],
        "examples": _examples(tokenizer, texts),
    }


def _characters(tokenizer: "PreTrainedTokenizerFast", counts: Mapping[str, int]) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab()
    dropped = {character: count for character, count in counts.items() if character not in vocabulary}
    by_frequency = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return {
        "num_kept": len(counts) - len(dropped),
        "num_dropped": len(dropped),
        "coverage": 1 - sum(dropped.values()) / max(1, sum(counts.values())),
        "most_frequent_dropped": [list(item) for item in by_frequency[:NUM_DROPPED_SHOWN]],
    }


def _examples(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> list[dict[str, Any]]:
    """Segment lines from all over the texts; only words longer than a line are cut."""
    lines = [
        line
        for text in _evenly(texts, NUM_EXAMPLES)
        for line in textwrap.wrap(" ".join(text.split()), EXAMPLE_CHARACTERS, break_on_hyphens=False)
    ]
    backend = plain_text_backend(tokenizer)
    excerpts = _evenly(lines, NUM_EXAMPLES)
    return [
        {"text": text, "tokens": tokenizer.convert_ids_to_tokens(encoding.ids)}
        for text, encoding in zip(excerpts, encode_all(backend, excerpts), strict=True)
    ]


def _evenly(items: Sequence[Item], max_items: int) -> list[Item]:
    """Pick the middle items of `max_items` equal spans, or all items if there are no more."""
    num_items = min(len(items), max_items)
    return [items[(2 * index + 1) * len(items) // (2 * num_items)] for index in range(num_items)]


def render_report(report: Mapping[str, Any]) -> str:
    """Render the report as some ten lines of text, without control characters of terminals."""
    characters, held_out = report["characters"], report["held_out"]
    fit = f"{held_out['tokens_per_word']:.2f} tokens per word, {held_out['bytes_per_token']:.2f} bytes per token"
    text = f"{held_out['num_words']:,} words of text: {held_out['part']}"
    dropped = [f"{character}:{count:,}" for character, count in characters["most_frequent_dropped"]]
    fate = "spelled as bytes" if report["pieces"]["num_byte"] else "that become <unk>"
    blocks = {
        "vocabulary": [f"{report['vocabulary_size']:,} tokens"],
        "fit": [f"{fit} ({text})"],
        "unknown": [f"{held_out['unknown_rate']:.4%} of the tokens"] if held_out["unknown_rate"] else [],
        "rare": _wrapped([f"{characters['num_dropped']:,} characters {fate}:", *dropped], "  ") if dropped else [],
        "longest": _wrapped(report["longest_pieces"], "  ")[:1],
        "examples": [" ".join(example["tokens"]) for example in _evenly(report["examples"], NUM_EXAMPLES_SHOWN)],
    }
    return "\n".join(
        f"{'' if number else label:{LABEL_COLUMNS}}{_shortened(_printable(line))}"
        for label, lines in blocks.items()
        for number, line in enumerate(lines)
    )


def _wrapped(items: Sequence[str], separator: str) -> list[str]:
    columns = LINE_COLUMNS - LABEL_COLUMNS
    return textwrap.wrap(separator.join(items), columns, break_on_hyphens=False, max_lines=3, placeholder=" …")


def _printable(line: str) -> str:
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in line
    )


def _shortened(line: str) -> str:
    """Cut the line to the width of the report; characters of East Asia are two columns wide."""
    columns = LINE_COLUMNS - LABEL_COLUMNS
    widths = accumulate(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)
    num_fitting = sum(width <= columns for width in widths)
    return line if num_fitting == len(line) else line[: num_fitting - 1] + "…"


def tokens_by_kind(tokenizer: "PreTrainedTokenizerFast") -> dict[str, list[str]]:
    """Group the tokens, by id, under special, byte, unused, single_character and other."""
    kinds: dict[str, list[str]] = {"special": [], "byte": [], "unused": [], "single_character": [], "other": []}
    special, single_bytes = special_token_ids(tokenizer), byte_ids(tokenizer)
    for piece, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if UNUSED_TOKEN.fullmatch(piece):
            kind = "unused"
        elif token_id in special:
            kind = "special"
        elif token_id in single_bytes:
            kind = "byte"
        else:
            kind = "single_character" if len(piece) == 1 else "other"
        kinds[kind].append(piece)
    return kinds


def byte_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of the tokens for single bytes; none if the model does not fall back to bytes."""
    if not json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("byte_fallback"):
        return set()
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[piece] for piece in BYTE_TOKENS if piece in vocabulary}


def count_ids(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> Counter[int]:
    encodings = encode_all(plain_text_backend(tokenizer), texts)
    return Counter(chain.from_iterable(encoding.ids for encoding in encodings))


def encode_all(backend: "Tokenizer", texts: Sequence[str]) -> Iterator["Encoding"]:
    """Yield the encoding of each text, without special tokens."""
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        yield from backend.encode_batch(texts[start : start + TEXTS_AT_ONCE], add_special_tokens=False)


def plain_text_backend(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Copy the tokenizer for plain text: no special tokens found or added, no truncation or padding."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()))
