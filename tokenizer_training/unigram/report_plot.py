"""Draw the report on a tokenizer: tokens per word on a scale, the lengths of the tokens, a sentence cut into tokens."""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlm_common.figures import new_figure
from tokenizer_training.unigram.normalization import WORD_MARK
from tokenizer_training.unigram.report import encode_all, plain_text_backend, tokens_by_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.font_manager import FontProperties
    from transformers import PreTrainedTokenizerFast

INCHES = (9.0, 4.9)
DOTS_PER_INCH = 200
MUTED = "#6b7280"
DARK = "#1f2937"
BAR_COLOR = "#0072b2"
# Neighbors differ, and dark text can be read on each.
TOKEN_COLORS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fbcfe8", "#ddd6fe")
# A text with fewer spaces than this is of a language that does not separate words by them.
MAX_CHARACTERS_PER_WORD = 15.0
SENTENCE_CHARACTERS = (60, 150)
NUM_CANDIDATES = 200
SENTENCE_POINTS = 12.0
FIRST_LINE_POINTS, LINE_POINTS, SPACE_POINTS, MAX_LINES = 26.0, 24.0, 6.0, 3


class Zone(NamedTuple):
    """A part of the scale of tokens per word: its end, its meaning, and its color."""

    stop: float
    verdict: str
    color: str


ZONES = (
    Zone(1.5, "good: most words are a single token", "#86efac"),
    Zone(2.0, "usual for a small vocabulary, or a language of long words", "#d9f99d"),
    Zone(2.5, "high: try more text, or a larger --vocab-size", "#fde68a"),
    Zone(3.0, "very high: is this text like the text it was trained on?", "#fca5a5"),
)


def verdict(tokens_per_word: float) -> str:
    return next((zone.verdict for zone in ZONES if tokens_per_word < zone.stop), ZONES[-1].verdict)


def draw_report(report: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> bytes:
    """Draw the report as a PNG image of 1800 x 980 pixels; the example is a sentence of the texts.

    The bytes are the same for the same arguments, version of matplotlib and, for characters that its font lacks,
    installed fonts.
    """
    held_out = report["held_out"]
    with new_figure(figsize=INCHES, dpi=DOTS_PER_INCH) as figure:
        figure.set_layout_engine("none")
        title = f"Unigram tokenizer, {report['vocabulary_size']:,} tokens"
        figure.text(0.03, 0.932, title, size=15, weight="bold", color=DARK)
        figure.text(0.03, 0.88, f"measured on {_describe_source(held_out)}", size=9.5, color=MUTED)
        _draw_fit(figure.add_axes((0.03, 0.40, 0.40, 0.44)), held_out, texts)
        kinds = tokens_by_kind(tokenizer)
        _draw_lengths(figure.add_axes((0.53, 0.49, 0.44, 0.33)), kinds["single_character"] + kinds["other"])
        _draw_example(figure.add_axes((0.03, 0.01, 0.94, 0.31)), tokenizer, texts, held_out["tokens_per_word"])
        image = io.BytesIO()
        figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _describe_source(held_out: Mapping[str, Any]) -> str:
    split, _, state = held_out["part"].partition(", ")
    source = {"held out": "held-out text", "trained on": "the text that it was trained on"}.get(state, f"{split} text")
    return f"{held_out['num_words']:,} words of {source}"


def _draw_fit(axes: "Axes", held_out: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Draw tokens per word as a number, on a scale, and in words; characters per token if there are no words."""
    axes.set_axis_off()
    axes.set(xlim=(1.0, ZONES[-1].stop), ylim=(0, 1))
    number, num_characters = held_out["tokens_per_word"], sum(map(len, texts))
    if not held_out["num_words"]:
        axes.text(1.0, 0.5, "no text to measure on", size=12, color=MUTED)
        return
    if num_characters / held_out["num_words"] > MAX_CHARACTERS_PER_WORD:
        axes.text(1.0, 0.55, f"{num_characters / held_out['num_tokens']:.2f}", size=40, weight="bold", color=DARK)
        axes.text(1.0, 0.42, "characters per token", size=12, color=DARK)
        axes.text(1.0, 0.30, "this text has few spaces between words", size=9.5, color=MUTED)
        return
    shown = axes.text(1.0, 0.62, f"{number:.2f}", size=40, weight="bold", color=DARK)
    axes.annotate("tokens per word", (1.05, 0), (0, 8), xycoords=shown, textcoords="offset points", size=13, color=DARK)
    start = 1.0
    for zone in ZONES:
        axes.barh(0.36, zone.stop - start, left=start, height=0.10, color=zone.color, edgecolor="white", linewidth=1.5)
        axes.text(start, 0.22, f"{start:.1f}", size=8, color=MUTED, ha="left" if start == 1.0 else "center")
        start = zone.stop
    axes.text(start, 0.22, f"{start:.1f}+", size=8, color=MUTED, ha="right")
    axes.plot([min(max(number, 1.0), start)], [0.46], marker="v", markersize=10, color=DARK, clip_on=False)
    axes.text(1.0, 0.06, verdict(number), size=9.5, color=DARK)


def _draw_lengths(axes: "Axes", pieces: Sequence[str]) -> None:
    """Draw the number of tokens of each length in characters, without the mark of a word's start."""
    counts = Counter(len(piece.removeprefix(WORD_MARK)) for piece in pieces if piece != WORD_MARK)
    axes.bar(list(counts.keys()), list(counts.values()), color=BAR_COLOR, width=0.8)
    axes.set_title("How long the tokens are", loc="left", size=11, color=DARK, pad=10)
    axes.set_xlabel("characters", color=MUTED, size=9)
    axes.set_ylabel("tokens", color=MUTED, size=9)
    axes.set_xlim(0.3, max(counts, default=1) + 0.7)
    axes.set_xticks(range(1, max(counts, default=1) + 1))
    axes.tick_params(colors=MUTED, length=0, labelsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _draw_example(axes: "Axes", tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str], ratio: float) -> None:
    """Draw a sentence with its tokens in different colors and space between words."""
    width = axes.get_position().width * INCHES[0] * 72
    height = axes.get_position().height * INCHES[1] * 72
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.text(0, 0, "A sentence, cut into tokens", size=11, color=DARK, va="top")
    tokens = choose_example(tokenizer, texts, ratio)
    font = _font_for("".join(tokens))
    if not tokens or font is None:
        reason = "no font here has the characters of this text; report.json has examples" if tokens else "no text"
        axes.text(0, 30, reason, size=9.5, color=MUTED, va="top")
        return
    x, line, number = 0.0, 0, 0
    for word in _words(tokens):
        widths = [_width(token, font) + 5 for token in word]
        if x + sum(widths) > width >= sum(widths):
            x, line = 0.0, line + 1
        for token, token_width in zip(word, widths, strict=True):
            if x + token_width > width:
                x, line = 0.0, line + 1
            if line == MAX_LINES:
                return
            y = FIRST_LINE_POINTS + line * LINE_POINTS
            _draw_token(axes, x, y, token_width, TOKEN_COLORS[number % len(TOKEN_COLORS)])
            axes.text(x + token_width / 2, y + 13.5, token, ha="center", color=DARK, fontproperties=font)
            x, number = x + token_width, number + 1
        x += SPACE_POINTS


def _draw_token(axes: "Axes", x: float, y: float, width: float, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=3"
    axes.add_patch(FancyBboxPatch((x + 0.5, y), width - 1, 18.5, boxstyle=style, facecolor=color, edgecolor="none"))


def choose_example(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str], ratio: float) -> list[str]:
    """Return the tokens of the sentence whose number of tokens per word is nearest to `ratio`.

    Without sentences of a usual length it is the start of the text; without text there are no tokens.
    """
    shortest, longest = SENTENCE_CHARACTERS
    sentences = [
        " ".join(sentence.split())
        for text in texts
        for sentence in re.split(r"(?<=[.!?…。！？])\s+|(?<=[。！？])", text)  # noqa: RUF001
    ]
    usual = [sentence for sentence in sentences if shortest <= len(sentence) <= longest and sentence[0].isupper()]
    usual = usual or [sentence for sentence in sentences if shortest <= len(sentence) <= longest]
    candidates = usual[:: len(usual) // NUM_CANDIDATES + 1] or [text[:longest] for text in sentences if text][:1]
    encodings = list(encode_all(plain_text_backend(tokenizer), candidates))
    if not encodings:
        return []
    ratios = [len(found.ids) / len(text.split()) for found, text in zip(encodings, candidates, strict=True)]
    return list(encodings[min(range(len(ratios)), key=lambda index: abs(ratios[index] - ratio))].tokens)


def _words(tokens: Sequence[str]) -> list[list[str]]:
    """Group tokens into words, without the marks of the words' starts."""
    words: list[list[str]] = []
    for token in tokens:
        if token.startswith(WORD_MARK) or not words:
            words.append([])
        if shown := token.removeprefix(WORD_MARK):
            words[-1].append(shown)
    return [word for word in words if word]


def _width(text: str, font: "FontProperties") -> float:
    """Return the width of a text, in points."""
    from matplotlib.backends.backend_agg import RendererAgg

    width, _, _ = RendererAgg(1, 1, DOTS_PER_INCH).get_text_width_height_descent(text, font, ismath=False)
    return width * 72 / DOTS_PER_INCH


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
