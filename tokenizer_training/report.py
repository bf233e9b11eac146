"""Report on the quality of a tokenizer: measures and examples as JSON, as text and as a plot."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from textwrap import shorten
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
from tokenizer_training.fit import TEXTS_AT_ONCE, Fit, describe_fits, fit_of, measure_fits, separates_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.font_manager import FontProperties
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

    from tokenizer_training.corpus_sample import CorpusSample

Item = TypeVar("Item")

NUM_DROPPED_SHOWN = 20
NUM_LONGEST = 20
ASCII = "".join(map(chr, range(0x80)))
NUM_EXAMPLES = 10
NUM_EXAMPLES_SHOWN = 3
EXAMPLE_CHARACTERS = 80
LINE_COLUMNS = 120
LABEL_COLUMNS = 12

# Size of the plot, and height of a source's row in it.
INCHES = (9.0, 3.6)
ROW_INCHES = 0.42
MAX_ROWS = 24
DARK = "#1f2937"
# Background colors of tokens. Adjacent colors differ, and dark text is readable on each.
TOKEN_COLORS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fbcfe8", "#ddd6fe")
# Lengths of sentences that fit on a line of the plot, with a little space around each token.
SENTENCE_CHARACTERS = (30, 70)
SENTENCE_POINTS, TOKEN_POINTS, SPACE_POINTS = 10.5, 4.5, 5.0
NUM_CANDIDATES = 200
# The zones of the scale of tokens per word. Each zone has its end, its meaning, and its color.
ZONES = (
    (1.5, "good: most words are a single token", "#86efac"),
    (2.0, "usual for a small vocabulary, or a language with long words", "#d9f99d"),
    (2.5, "high: try more text, or a larger --vocab-size", "#fde68a"),
    (3.0, "very high: is this text like the text it was trained on?", "#fca5a5"),
)


@dataclass(frozen=True)
class TokenizerQuality:
    """Measures of how well a tokenizer fits some texts. A ratio is 0 if its denominator is 0.

    Attributes:
        num_texts: number of texts.
        num_bytes: size of the texts in UTF-8.
        num_words: number of words, separated by white space.
        num_characters: number of characters, including white space.
        num_tokens: number of tokens.
        unknown_rate: fraction of the tokens that are <unk>.
        unknown_character_rate: fraction of the characters, after normalization and without white space, that are in an
            <unk>.
        byte_rate: fraction of the tokens that are single bytes of a character.
        tokens_per_word: average number of tokens per word, also called fertility.
        bytes_per_token: average number of bytes per token.
        characters_per_token: average number of characters per token.
    """

    num_texts: int
    num_bytes: int
    num_words: int
    num_characters: int
    num_tokens: int
    unknown_rate: float
    unknown_character_rate: float
    byte_rate: float
    tokens_per_word: float
    bytes_per_token: float
    characters_per_token: float


def measure_quality(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> TokenizerQuality:
    """Measure a tokenizer on plain texts, in which strings that look like special tokens are ordinary text."""
    encodings = encode_all(plain_text_backend(tokenizer), texts)
    id_counts = Counter(chain.from_iterable(encoding.ids for encoding in encodings))
    num_tokens = id_counts.total()
    num_unknown = id_counts[tokenizer.unk_token_id]
    normalizer = tokenizer.backend_tokenizer.normalizer
    normalized = [normalizer.normalize_str(text) for text in texts] if normalizer else texts
    num_unknown_characters = _num_unknown_characters(tokenizer, normalized) if num_unknown else 0
    num_bytes = sum(len(text.encode()) for text in texts)
    num_words = sum(len(text.split()) for text in texts)
    num_characters = sum(map(len, texts))
    return TokenizerQuality(
        num_texts=len(texts),
        num_bytes=num_bytes,
        num_words=num_words,
        num_characters=num_characters,
        num_tokens=num_tokens,
        unknown_rate=_ratio(num_unknown, num_tokens),
        unknown_character_rate=_ratio(num_unknown_characters, sum(map(_num_visible, normalized))),
        byte_rate=_ratio(sum(id_counts[token_id] for token_id in byte_ids(tokenizer)), num_tokens),
        tokens_per_word=_ratio(num_tokens, num_words),
        bytes_per_token=_ratio(num_bytes, num_tokens),
        characters_per_token=_ratio(num_characters, num_tokens),
    )


def _num_unknown_characters(tokenizer: "PreTrainedTokenizerFast", normalized_texts: Sequence[str]) -> int:
    backend = plain_text_backend(tokenizer)
    backend.normalizer = None  # so that offsets refer to the normalized text
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
    """Measure a tokenizer on held-out text, and print a report.

    Args:
        tokenizer: the tokenizer.
        sample: sample that the tokenizer was trained on.
        held_out: {source: (name of the text, passages to measure on)}.
        inputs: {source: entry of the report about the source's share in the sample}; empty for a single corpus.

    Returns:
        The report as JSON values, and its plot as PNG.
    """
    parts = dict.fromkeys(part for part, _ in held_out.values())
    source = next(iter(parts)) if len(parts) == 1 else "all sources"
    texts = [text for _, passages in held_out.values() for text in passages]
    quality = measure_quality(tokenizer, texts)
    fits = measure_fits(tokenizer, {name: passages for name, (_, passages) in held_out.items()})
    report = build_report(tokenizer, quality, source, texts, sample.counts.characters, sample.record, fits)
    for name, source_input in inputs.items():
        part, passages = held_out[name]
        measured = {"part": part} | asdict(measure_quality(tokenizer, passages))
        report.setdefault("sources", {})[name] = source_input | {"held_out": measured}
    print(render_report(report))
    return report, draw_report(report, tokenizer, texts)


def build_report(
    tokenizer: "PreTrainedTokenizerFast",
    quality: TokenizerQuality,
    source: str,
    texts: Sequence[str],
    character_counts: Mapping[str, int],
    input_record: dict[str, Any],
    fits: Sequence[Fit] | None = None,
) -> dict[str, Any]:
    """Build the report as JSON values.

    Args:
        tokenizer: the tokenizer.
        quality: its quality on the held-out texts.
        source: name of the held-out texts, human-readable.
        texts: the held-out texts. Examples are taken from all parts of them.
        character_counts: counts of the characters of the sample, after normalization. The report lists the characters
            that are not tokens, because they become <unk> or bytes.
        input_record: amounts of text that were read and used.
        fits: measures of each source; None to measure the texts as one source.
    """
    fits = measure_fits(tokenizer, {"": texts}) if fits is None else fits
    kinds = tokens_by_kind(tokenizer)
    ordinary = kinds["single_character"] + kinds["other"]
    return {
        "vocabulary_size": vocabulary_size(tokenizer),
        "pieces": {f"num_{kind}": len(tokens) for kind, tokens in kinds.items()},
        "input": input_record,
        "characters": _characters(tokenizer, character_counts),
        "held_out": {"part": source} | asdict(quality),
        "fit": [fit.record for fit in fits],
        "longest_pieces": sorted(ordinary, key=lambda token: (-len(token), token))[:NUM_LONGEST],
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
    """Encode some lines from all parts of the texts. Only words that are longer than a line are cut."""
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
    """Pick `max_items` items at equal distances, or all items if there are fewer."""
    num_items = min(len(items), max_items)
    return [items[(2 * index + 1) * len(items) // (2 * num_items)] for index in range(num_items)]


def render_report(report: Mapping[str, Any]) -> str:
    """Render the report as a few lines of text. Control characters are escaped."""
    characters, held_out = report["characters"], report["held_out"]
    fits: dict[str, list[Fit]] = {}
    for record in report["fit"]:
        fits.setdefault(record["source"], []).append(fit_of(record))
    # With several sources there is no mean, because it could mix tokens per word with characters per token.
    fit = "".join(f"{describe_fits(source_fits)}, " for source_fits in fits.values() if len(fits) == 1)
    fit += f"{held_out['bytes_per_token']:.2f} bytes per token"
    has_words = all(fit.has_spaces for source_fits in fits.values() for fit in source_fits)
    amount = f"{held_out['num_words']:,} words" if has_words else f"{held_out['num_characters']:,} characters"
    fate = "spelled as bytes" if report["pieces"]["num_byte"] else "that become <unk>"
    dropped = "  ".join(f"{character}:{count:,}" for character, count in characters["most_frequent_dropped"])
    lines = [
        ("vocabulary", f"{report['vocabulary_size']:,} tokens"),
        ("fit", f"{fit} ({amount} of text: {held_out['part']})"),
        ("unknown", f"{held_out['unknown_rate']:.4%} of the tokens" if held_out["unknown_rate"] else ""),
        ("rare", f"{characters['num_dropped']:,} characters {fate}:  {dropped}" if dropped else ""),
    ]
    for number, (name, source) in enumerate(report.get("sources", {}).items()):
        quality = source["held_out"]
        fit = "".join(f"{ratios}, " for ratios in [describe_fits(fits.get(name, []))] if ratios)
        text = f"{name}: {fit}{quality['bytes_per_token']:.2f} bytes per token, {quality['unknown_rate']:.4%} unknown; "
        text += f"{source['share']:.1%} of the sample"
        lines.append(("" if number else "sources", text + f", counted {source['times_counted']:.1f} times"))
    examples = _evenly(report["examples"], NUM_EXAMPLES_SHOWN)
    lines += [("" if number else "examples", " ".join(example["tokens"])) for number, example in enumerate(examples)]
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
    """Draw the tokens per word on a scale, with a row for each source, and a sentence cut into tokens.

    Returns:
        The plot as PNG. The bytes depend only on the arguments, the version of matplotlib and, if its font lacks some
        of the characters, the installed fonts.
    """
    held_out, fits = report["held_out"], [fit_of(record) for record in report["fit"]]
    split, _, state = held_out["part"].partition(", ")
    source = {"held out": "held-out text", "trained on": "the text that it was trained on"}.get(state, f"{split} text")
    num_rows = min(len(fits), MAX_ROWS)
    width, height = INCHES[0], INCHES[1] if num_rows <= 1 else 1.7 + num_rows * ROW_INCHES
    with new_figure(figsize=(width, height)) as figure:
        figure.set_layout_engine("none")
        title = f"Unigram tokenizer, {report['vocabulary_size']:,} tokens"
        figure.text(0.03, 1 - 0.32 / height, title, size=15, weight="bold", color=DARK)
        amount = f"{held_out['num_words']:,} words of " if all(fit.has_spaces for fit in fits) else ""
        figure.text(0.03, 1 - 0.61 / height, f"measured on {amount}{source}", size=9.5, color=MUTED)
        example_height = 0.72 / height
        area = (0.03, example_height + 0.25 / height, 0.94, 1 - example_height - 0.95 / height)
        if num_rows > 1:
            _draw_rows(figure.add_axes(area), fits)
        else:
            _draw_fit(figure.add_axes((0.03, 0.27, 0.55, 0.52)), fits[0] if fits else None)
        shown = [text for text in texts if fits and separates_words(text) == fits[0].has_spaces] or texts
        tokens = choose_example(tokenizer, shown, fits[0].tokens_per_word if fits else 0.0)
        _draw_example(figure.add_axes((0.03, 0.07 / height, 0.94, example_height)), tokens)
        return image_of(figure)


def _draw_fit(axes: "Axes", fit: Fit | None) -> None:
    """Draw the tokens per word as a number, on a scale and in words.

    If there are no words, draw the characters per token.
    """
    axes.set_axis_off()
    axes.set(xlim=(1.0, ZONES[-1][0]), ylim=(0, 1))
    if fit is None or not fit.num_words:
        axes.text(1.0, 0.5, "no text to measure on", size=12, color=MUTED)
        return
    if not fit.has_spaces:
        axes.text(1.0, 0.55, f"{fit.characters_per_token:.2f}", size=36, weight="bold", color=DARK)
        axes.text(1.0, 0.38, "characters per token", size=12, color=DARK)
        axes.text(1.0, 0.20, "this text has few spaces between words", size=9.5, color=MUTED)
        return
    number = fit.tokens_per_word
    shown = axes.text(1.0, 0.62, f"{number:.2f}", size=36, weight="bold", color=DARK)
    axes.annotate("tokens per word", (1.05, 0), (0, 8), xycoords=shown, textcoords="offset points", size=13, color=DARK)
    _draw_scale(axes, number, 1.0, ZONES[-1][0] - 1.0, 0.36, 0.12)
    for number_shown in (1.0, *(stop for stop, _, _ in ZONES)):
        is_last = number_shown == ZONES[-1][0]
        alignment = "left" if number_shown == 1.0 else "right" if is_last else "center"
        axes.text(number_shown, 0.17, f"{number_shown:.1f}{'+' * is_last}", size=8, color=MUTED, ha=alignment)
    axes.text(1.0, 0.0, verdict(number), size=9.5, color=DARK)


def _draw_scale(axes: "Axes", number: float, left: float, width: float, height: float, bar: float) -> None:
    """Draw the zones of tokens per word as a bar, with a marker at the number."""
    scale, start = width / (ZONES[-1][0] - 1.0), 1.0
    for stop, _, color in ZONES:
        place = left + (start - 1.0) * scale
        axes.barh(height, (stop - start) * scale, left=place, height=bar, color=color, edgecolor="white", linewidth=1.5)
        start = stop
    place = left + (min(max(number, 1.0), start) - 1.0) * scale
    axes.plot([place], [height + 0.92 * bar], marker="v", markersize=7, color=DARK, clip_on=False)


def _draw_rows(axes: "Axes", fits: Sequence[Fit]) -> None:
    """Draw a row for each source: its name, its ratio and, for tokens per word, the position on the scale."""
    axes.set_axis_off()
    shown = fits[:MAX_ROWS]
    axes.set(xlim=(0, 1), ylim=(-len(shown) + 0.4, 0.6))
    for number, fit in enumerate(shown):
        row = -float(number)
        axes.text(0.0, row, shorten(fit.source or "all", 18, placeholder="…"), size=10, color=DARK, va="center")
        value = fit.tokens_per_word if fit.has_spaces else fit.characters_per_token
        axes.text(0.24, row, f"{value:.2f}", size=13, weight="bold", color=DARK, va="center", ha="right")
        if fit.has_spaces:
            axes.text(0.255, row, "tokens per word", size=9.5, color=DARK, va="center")
            _draw_scale(axes, value, 0.40, 0.2, row, 0.3)
            axes.text(0.615, row, verdict(value), size=8.5, color=MUTED, va="center")
        else:
            axes.text(0.255, row, "characters per token", size=9.5, color=DARK, va="center")
            axes.text(0.615, row, "few spaces between words", size=8.5, color=MUTED, va="center")
    if fits[MAX_ROWS:]:
        axes.text(0.0, 0.6 - len(shown), f"{len(fits) - MAX_ROWS} more in report.json", size=8.5, color=MUTED)


def _draw_example(axes: "Axes", tokens: Sequence[str]) -> None:
    """Draw a sentence on a line, with its tokens in different colors and space between words."""
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
    """Return the tokens of the sentence whose number of tokens per word is closest to `ratio`.

    If no sentence has a usual length, the start of the text is used. If there is no text, the result is empty.
    """
    shortest, longest = SENTENCE_CHARACTERS
    ends = re.compile(r"(?<=[.!?…。！？])\s+|(?<=[。！？])")  # noqa: RUF001
    sentences = [" ".join(sentence.split()) for text in texts for sentence in ends.split(text)]
    usual = [sentence for sentence in sentences if shortest <= len(sentence) <= longest]
    candidates = usual[:: len(usual) // NUM_CANDIDATES + 1] or [text[:longest] for text in sentences if text][:1]
    encodings = zip(candidates, encode_all(plain_text_backend(tokenizer), candidates), strict=True)
    by_distance = {abs(len(encoding.ids) / len(text.split()) - ratio): encoding for text, encoding in encodings}
    return list(by_distance[min(by_distance)].tokens) if by_distance else []


def _font_for(text: str) -> "FontProperties | None":
    """Find a font with all characters of a text: matplotlib's default font if possible, or else an installed font."""
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
    """Group the tokens, sorted by id, by their kind: special, byte, unused, single_character or other."""
    kinds: dict[str, list[str]] = {"special": [], "byte": [], "unused": [], "single_character": [], "other": []}
    special, single_bytes = special_token_ids(tokenizer), byte_ids(tokenizer)
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if UNUSED_TOKEN.fullmatch(token):
            kind = "unused"
        elif token_id in special:
            kind = "special"
        elif token_id in single_bytes:
            kind = "byte"
        else:
            kind = "single_character" if len(token) == 1 else "other"
        kinds[kind].append(token)
    return kinds


def byte_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of the tokens for single bytes of characters; empty if the model has no such tokens."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    names = set(BYTE_TOKENS) if settings["model"].get("byte_fallback") else set()
    if (settings["decoder"] or {}).get("type") == "ByteLevel":
        from tokenizers import pre_tokenizers

        ascii_tokens = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(ASCII)
        names |= set(pre_tokenizers.ByteLevel.alphabet()).difference(*(token for token, _ in ascii_tokens))
    return {token_id for token, token_id in tokenizer.get_vocab().items() if token in names}


def encode_all(backend: "Tokenizer", texts: Sequence[str]) -> Iterator["Encoding"]:
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        yield from backend.encode_batch(texts[start : start + TEXTS_AT_ONCE], add_special_tokens=False)


def plain_text_backend(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Copy a tokenizer for plain text. The copy neither finds nor adds special tokens, and does not truncate or pad."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()))
