"""Report on a tokenizer, so that its user can judge it: figures and examples, as JSON, as text and as a picture."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from mlm_common.figures import MUTED, image_of, new_figure
from mlm_common.tokenizer import (
    BYTE_TOKENS,
    UNUSED_TOKEN,
    plain_text_tokenizer_json,
    special_token_ids,
    vocabulary_size,
)
from tokenizer_training.config import WORD_MARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.font_manager import FontProperties
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

    from tokenizer_training.corpus_sample import CorpusSample

Item = TypeVar("Item")

# Encodings are many times the size of their text, so few are kept at a time.
TEXTS_AT_ONCE = 64
NUM_DROPPED_SHOWN = 20
NUM_LONGEST = 20
FIRST_NON_ASCII = 0x80
NUM_EXAMPLES = 10
NUM_EXAMPLES_SHOWN = 3
EXAMPLE_CHARACTERS = 80
LINE_COLUMNS = 120
LABEL_COLUMNS = 12

# Of the picture.
INCHES = (9.0, 3.6)
DARK = "#1f2937"
# Neighbors differ, and dark text can be read on each.
TOKEN_COLORS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fbcfe8", "#ddd6fe")
# A text with fewer spaces than this is of a language that does not separate words by them.
MAX_CHARACTERS_PER_WORD = 15.0
# So long that most sentences fit on a line, each token with a little space around it.
SENTENCE_CHARACTERS = (30, 70)
SENTENCE_POINTS, TOKEN_POINTS, SPACE_POINTS = 10.5, 4.5, 5.0
NUM_CANDIDATES = 200
# The parts of the scale of tokens per word: where each ends, what it means, and its color.
ZONES = (
    (1.5, "good: most words are a single token", "#86efac"),
    (2.0, "usual for a small vocabulary, or a language of long words", "#d9f99d"),
    (2.5, "high: try more text, or a larger --vocab-size", "#fde68a"),
    (3.0, "very high: is this text like the text it was trained on?", "#fca5a5"),
)


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


def measure_quality(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> TokenizerQuality:
    """Measure the tokenizer on plain texts: what looks like a special token in them is text, too."""
    encodings = encode_all(plain_text_backend(tokenizer), texts)
    id_counts = Counter(chain.from_iterable(encoding.ids for encoding in encodings))
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


def report_on(
    tokenizer: "PreTrainedTokenizerFast",
    sample: "CorpusSample",
    held_out: Mapping[str, tuple[str, list[str]]],
    inputs: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, Any], bytes]:
    """Measure the tokenizer on held-out text, and print the report; return it, and its picture as PNG.

    Args:
        held_out: of each source the name of a part of its corpus, and text of that part to measure on.
        inputs: what the report says of the part of each source in the sample; empty for a single corpus.
    """
    parts = dict.fromkeys(part for part, _ in held_out.values())
    source = next(iter(parts)) if len(parts) == 1 else "all sources"
    texts = [text for _, passages in held_out.values() for text in passages]
    quality = measure_quality(tokenizer, texts)
    report = build_report(tokenizer, quality, source, texts, sample.counts.characters, sample.record)
    for name, of_source in inputs.items():
        part, passages = held_out[name]
        measured = {"part": part} | asdict(measure_quality(tokenizer, passages))
        report.setdefault("sources", {})[name] = of_source | {"held_out": measured}
    print(render_report(report))
    return report, draw_report(report, tokenizer, texts)


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
        source: the split of the corpus that the held-out texts come from, human-readable.
        texts: examples of segmentations come from all over them.
        character_counts: of the corpus, after normalization. A character is kept if it is a token: only then is it
            never unknown or spelled in bytes.
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
    """Render the report as a few lines of text, without control characters of terminals."""
    characters, held_out = report["characters"], report["held_out"]
    fit = f"{held_out['tokens_per_word']:.2f} tokens per word, {held_out['bytes_per_token']:.2f} bytes per token"
    fate = "spelled as bytes" if report["pieces"]["num_byte"] else "that become <unk>"
    dropped = "  ".join(f"{character}:{count:,}" for character, count in characters["most_frequent_dropped"])
    lines = [
        ("vocabulary", f"{report['vocabulary_size']:,} tokens"),
        ("fit", f"{fit} ({held_out['num_words']:,} words of text: {held_out['part']})"),
        ("unknown", f"{held_out['unknown_rate']:.4%} of the tokens" if held_out["unknown_rate"] else ""),
        ("rare", f"{characters['num_dropped']:,} characters {fate}:  {dropped}" if dropped else ""),
    ]
    for number, (name, source) in enumerate(report.get("sources", {}).items()):
        of = source["held_out"]
        fit = f"{of['tokens_per_word']:.2f} tokens per word, {of['bytes_per_token']:.2f} bytes per token"
        text = f"{name}: {fit}, {of['unknown_rate']:.4%} unknown; {source['share']:.1%} of the sample"
        lines.append(("" if number else "sources", text + f", counted {source['times_counted']:.1f} times"))
    examples = _evenly(report["examples"], NUM_EXAMPLES_SHOWN)
    lines += [("" if number else "examples", " ".join(one["tokens"])) for number, one in enumerate(examples)]
    return "\n".join(f"{label:{LABEL_COLUMNS}}{_shortened(_printable(line))}" for label, line in lines if line)


def _printable(line: str) -> str:
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in line
    )


def _shortened(line: str) -> str:
    columns = LINE_COLUMNS - LABEL_COLUMNS
    return line if len(line) <= columns else line[: columns - 1] + "…"


def verdict(tokens_per_word: float) -> str:
    return next((words for stop, words, _ in ZONES if tokens_per_word < stop), ZONES[-1][1])


def draw_report(report: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> bytes:
    """Draw tokens per word on a scale, and a sentence of the texts cut into tokens, as a PNG image.

    The bytes are the same for the same arguments, version of matplotlib and, for characters that its font lacks,
    installed fonts.
    """
    held_out = report["held_out"]
    split, _, state = held_out["part"].partition(", ")
    source = {"held out": "held-out text", "trained on": "the text that it was trained on"}.get(state, f"{split} text")
    with new_figure(figsize=INCHES) as figure:
        figure.set_layout_engine("none")
        title = f"Unigram tokenizer, {report['vocabulary_size']:,} tokens"
        figure.text(0.03, 0.91, title, size=15, weight="bold", color=DARK)
        figure.text(0.03, 0.83, f"measured on {held_out['num_words']:,} words of {source}", size=9.5, color=MUTED)
        _draw_fit(figure.add_axes((0.03, 0.27, 0.55, 0.52)), held_out, sum(map(len, texts)))
        tokens = choose_example(tokenizer, texts, held_out["tokens_per_word"])
        _draw_example(figure.add_axes((0.03, 0.02, 0.94, 0.2)), tokens)
        return image_of(figure)


def _draw_fit(axes: "Axes", held_out: Mapping[str, Any], num_characters: int) -> None:
    """Draw tokens per word as a number, on a scale, and in words; characters per token if there are no words."""
    axes.set_axis_off()
    axes.set(xlim=(1.0, ZONES[-1][0]), ylim=(0, 1))
    number = held_out["tokens_per_word"]
    if not held_out["num_words"]:
        axes.text(1.0, 0.5, "no text to measure on", size=12, color=MUTED)
        return
    if num_characters / held_out["num_words"] > MAX_CHARACTERS_PER_WORD:
        axes.text(1.0, 0.55, f"{num_characters / held_out['num_tokens']:.2f}", size=36, weight="bold", color=DARK)
        axes.text(1.0, 0.38, "characters per token", size=12, color=DARK)
        axes.text(1.0, 0.20, "this text has few spaces between words", size=9.5, color=MUTED)
        return
    shown = axes.text(1.0, 0.62, f"{number:.2f}", size=36, weight="bold", color=DARK)
    axes.annotate("tokens per word", (1.05, 0), (0, 8), xycoords=shown, textcoords="offset points", size=13, color=DARK)
    start = 1.0
    for stop, _, color in ZONES:
        axes.barh(0.36, stop - start, left=start, height=0.12, color=color, edgecolor="white", linewidth=1.5)
        axes.text(start, 0.17, f"{start:.1f}", size=8, color=MUTED, ha="left" if start == 1.0 else "center")
        start = stop
    axes.text(start, 0.17, f"{start:.1f}+", size=8, color=MUTED, ha="right")
    axes.plot([min(max(number, 1.0), start)], [0.47], marker="v", markersize=10, color=DARK, clip_on=False)
    axes.text(1.0, 0.0, verdict(number), size=9.5, color=DARK)


def _draw_example(axes: "Axes", tokens: Sequence[str]) -> None:
    """Draw a sentence on a line, its tokens in different colors, with space between words."""
    axes.set_axis_off()
    axes.text(0, 0.75, "A sentence, cut into tokens", size=11, color=DARK)
    font = _font_for("".join(tokens))
    if not tokens or font is None:
        reason = "no font here has the characters of this text; report.json has examples" if tokens else "no text"
        axes.text(0, 0.3, reason, size=9.5, color=MUTED)
        return
    style: dict[str, Any] = {"va": "bottom", "color": DARK, "fontproperties": font, "parse_math": False}
    before: Any = axes.transData
    place, gap = (0.0, 0.2), TOKEN_POINTS
    for number, token in enumerate(tokens):
        gap += SPACE_POINTS * (token.startswith(WORD_MARK) and number > 0)
        if text := token.removeprefix(WORD_MARK):
            color = TOKEN_COLORS[number % len(TOKEN_COLORS)]
            box = {"boxstyle": "round,pad=0.2", "facecolor": color, "edgecolor": "none"}
            before = axes.annotate(
                text, place, (gap, 0), xycoords=before, textcoords="offset points", bbox=box, **style
            )
            place, gap = (1.0, 0.0), TOKEN_POINTS


def choose_example(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str], ratio: float) -> list[str]:
    """Return the tokens of the sentence whose number of tokens per word is nearest to `ratio`.

    Without sentences of a usual length it is the start of the text; without text there are no tokens.
    """
    shortest, longest = SENTENCE_CHARACTERS
    ends = re.compile(r"(?<=[.!?…。！？])\s+|(?<=[。！？])")  # noqa: RUF001
    sentences = [" ".join(sentence.split()) for text in texts for sentence in ends.split(text)]
    usual = [sentence for sentence in sentences if shortest <= len(sentence) <= longest]
    candidates = usual[:: len(usual) // NUM_CANDIDATES + 1] or [text[:longest] for text in sentences if text][:1]
    encodings = zip(candidates, encode_all(plain_text_backend(tokenizer), candidates), strict=True)
    near = {abs(len(found.ids) / len(text.split()) - ratio): found for text, found in encodings}
    return list(near[min(near)].tokens) if near else []


def _font_for(text: str) -> "FontProperties | None":
    """Find a font with all characters of the text: matplotlib's default or, if it lacks some, an installed one."""
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    characters = {ord(character) for character in text if not character.isspace()} - {ord(WORD_MARK)}
    usual = FontProperties(family="DejaVu Sans", size=SENTENCE_POINTS)
    others = sorted({entry.fname for entry in fontManager.ttflist if "LastResort" not in entry.fname})
    for font in [usual, *(FontProperties(fname=path, size=SENTENCE_POINTS) for path in others)]:
        path = font.get_file() or fontManager.findfont(font)
        if characters <= get_font(path).get_charmap().keys():
            return font
    return None


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
    """Return the ids of the tokens for single bytes, as parts of characters; none if the model has no such tokens."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    names = set(BYTE_TOKENS) if settings["model"].get("byte_fallback") else set()
    if (settings["decoder"] or {}).get("type") == "ByteLevel":
        from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

        names |= {token for byte, token in bytes_to_unicode().items() if byte >= FIRST_NON_ASCII}
    return {token_id for token, token_id in tokenizer.get_vocab().items() if token in names}


def encode_all(backend: "Tokenizer", texts: Sequence[str]) -> Iterator["Encoding"]:
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        yield from backend.encode_batch(texts[start : start + TEXTS_AT_ONCE], add_special_tokens=False)


def plain_text_backend(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Copy the tokenizer for plain text: no special tokens found or added, no truncation or padding."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()))
