"""The scores of models, with standard errors, and what chance would have scored.

Loss per token depends on the tokenizer: one that cuts text into few tokens has a high loss for each. Bits per byte of
the text and whole words do not. A score also says little without that of the same network before its training: of
BLiMP's pairs such a network gets more than half right, since the better sentence often has fewer tokens.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mlm_common.figures import COLORS, FAINT_ALPHA, MUTED, EndLabel, image_of, label_ends, new_figure, without_box
from train.scoring.answers import KeptAnswers, Measured, Measurer, measure_by_frequency
from train.scoring.queries import Material, Questions

Values = NDArray[np.float64]
BITS_PER_BYTE, FIRST_GUESS, FIVE_GUESSES, PAIRS = "bits per byte", "words, 1st guess", "words, 5 guesses", "pairs"
# A difference of more standard errors is chance in one case of twenty.
NORMAL_95 = 1.96
NUM_QUARTERS = 4
INCHES_A_PANEL, INCHES_HIGH = 3.2, 2.8


class Score(NamedTuple):
    """A mean, or a quotient of sums, over items that were drawn.

    errors: (items,), how far each item is from `value`; by them scores of the same items are compared.
    """

    value: float
    errors: Values

    @property
    def standard_error(self) -> float:
        num_items = len(self.errors)
        return float(np.std(self.errors, ddof=1)) / math.sqrt(num_items) if num_items > 1 else math.inf

    def minus(self, other: "Score") -> "Score":
        """Compute how much this is above another score of the same items; by pairs, so what they share cancels."""
        return Score(self.value - other.value, self.errors - other.errors)

    @property
    def is_chance(self) -> bool:
        return abs(self.value) <= NORMAL_95 * self.standard_error


@dataclass(frozen=True)
class Scored:
    """What one model, or one of the controls beside it, scored.

    scores: {measure: score}. parts: {measure: {part of the items: score}}.
    """

    name: str
    scores: dict[str, Score]
    parts: dict[str, dict[str, Score]] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredModels:
    """A model, or checkpoints of one run, first to last; and the controls beside them.

    weights_sha256: {model: hash of its `model.safetensors`, None without one}.
    """

    models: list[Scored]
    controls: list[Scored]
    weights_sha256: dict[str, str | None]


def mean_of(values: Values) -> Score:
    return Score(float(values.mean()), values - values.mean())


def quotient_of(numerators: Values, denominators: Values) -> Score:
    """Divide sum by sum; the errors are those of its linear approximation (Cochran 1977, section 2.11)."""
    value = float(numerators.sum() / denominators.sum())
    return Score(value, (numerators - value * denominators) / denominators.mean())


def score_models(
    questions: Questions, material: Material, strategy: tf.distribute.Strategy, kept: KeptAnswers
) -> ScoredModels:
    """Score the models that the questions are for, and beside them a network with random weights and mere guesses."""
    measurer = Measurer(questions, material, strategy, kept)
    models = [_scored(name, questions, material, one) for name, one in measurer.of_models().items()]
    controls = {
        f"{questions.name}, random weights": measurer.of_random_weights(),
        f"{questions.name}, no context": measure_by_frequency(questions, material),
    }
    scored_controls = [_scored(name, questions, material, one) for name, one in controls.items()]
    return ScoredModels(models, scored_controls, measurer.weights_sha256)


def _scored(name: str, questions: Questions, material: Material, measured: Measured) -> Scored:
    scores: dict[str, Score] = {}
    parts: dict[str, dict[str, Score]] = {}
    if material.words:
        bits = measured.words / math.log(2)
        texts = [material.documents[word.document][word.start : word.stop] for word in material.words]
        num_bytes = np.array([len(text.encode()) for text in texts], np.float64)
        scores[BITS_PER_BYTE] = quotient_of(bits, num_bytes)
        for measure, num_guesses in ((FIRST_GUESS, 1), (FIVE_GUESSES, 5)):
            scores[measure] = mean_of((measured.ranks < num_guesses).astype(np.float64))
        quarters = NUM_QUARTERS * questions.places // questions.max_length
        parts[f"{BITS_PER_BYTE}, by place in the row"] = {
            f"quarter {number + 1}": quotient_of(bits[quarters == number], num_bytes[quarters == number])
            for number in range(NUM_QUARTERS)
            if (quarters == number).any()
        }
    if material.pairs:
        good, bad = measured.sentences[::2], measured.sentences[1::2]
        preferred = np.where(good == bad, 0.5, (good < bad).astype(np.float64))
        scores[PAIRS] = mean_of(preferred)
        for kind in ("field", "term"):
            members = defaultdict(list)
            for number, pair in enumerate(material.pairs):
                members[getattr(pair, kind)].append(number)
            parts[f"{PAIRS}, by {kind}"] = {
                part: mean_of(preferred[of_part]) for part, of_part in sorted(members.items()) if part
            }
    return Scored(name, scores, parts)


def as_text(models: Sequence[ScoredModels]) -> str:
    """Write tables in Markdown: scores, those of parts, and what differs from what."""
    scored = [one for group in models for one in (*group.models, *group.controls)]
    tables = [_table("model", list(scored[0].scores), [(one.name, one.scores) for one in scored])]
    for title in scored[0].parts:
        columns = list(dict.fromkeys(part for one in scored for part in one.parts[title]))
        tables.append(_table(title, columns, [(one.name, one.parts[title]) for one in scored]))
    verdicts = [
        f"- {measure}: {one} {difference.value:+.4f} ± {difference.standard_error:.4f} beside {other}: "
        + ("does not differ" if difference.is_chance else "differs")
        for measure, one, other, difference in comparisons(models)
    ]
    return "\n\n".join([*tables, "\n".join(verdicts)])


def comparisons(models: Sequence[ScoredModels]) -> list[tuple[str, str, str, Score]]:
    """Compare each model with its controls and the models before it, a checkpoint with the one before; by measure."""
    compared: list[tuple[Scored, Scored]] = []
    for index, group in enumerate(models):
        before = [earlier.models[-1] for earlier in models[:index]]
        for model in group.models:
            compared += [(model, other) for other in (*group.controls, *before)]
            before = [model]
    return [
        (measure, one.name, other.name, score.minus(other.scores[measure]))
        for one, other in compared
        for measure, score in one.scores.items()
    ]


def as_json(models: Sequence[ScoredModels]) -> dict[str, Any]:
    """Collect scores, errors and comparisons for a file, and by which weights a model is known."""

    def record(score: Score) -> dict[str, float]:
        return {"value": score.value, "standard_error": score.standard_error, "items": len(score.errors)}

    return {
        "models": [
            {"name": one.name, "weights_sha256": group.weights_sha256[one.name]}
            | {"controls": [control.name for control in group.controls]}
            for group in models
            for one in group.models
        ],
        "scores": {
            one.name: {measure: record(score) for measure, score in one.scores.items()}
            | {title: {part: record(score) for part, score in parts.items()} for title, parts in one.parts.items()}
            for group in models
            for one in (*group.models, *group.controls)
        },
        "differences": [
            {"measure": measure, "of": one, "from": other, **record(score), "differs": not score.is_chance}
            for measure, one, other, score in comparisons(models)
        ],
    }


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, dict[str, Score]]]) -> str:
    def cell(score: Score | None) -> str:
        return f"{score.value:.3f} ± {score.standard_error:.3f}" if score else ""

    lines = [[title, *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(cell(scores.get(column)) for column in columns)] for name, scores in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_curve(scored: ScoredModels, file_format: str) -> bytes:
    """Draw each score of the checkpoints, with its 95 % interval, over the step; controls as dotted lines."""
    steps = [int(re.sub(r"\D", "", model.name.rpartition(", step ")[2])) for model in scored.models]
    measures = list(scored.models[0].scores)
    with new_figure(figsize=(INCHES_A_PANEL * len(measures), INCHES_HIGH)) as figure:
        for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
            scores = [model.scores[measure] for model in scored.models]
            values = [score.value for score in scores]
            axes.plot(steps, values, marker="o", markersize=3, color=COLORS[0], clip_on=False)
            axes.fill_between(
                steps,
                [score.value - NORMAL_95 * score.standard_error for score in scores],
                [score.value + NORMAL_95 * score.standard_error for score in scores],
                color=COLORS[0],
                alpha=FAINT_ALPHA,
                linewidth=0,
            )
            without_box(axes)
            axes.set_title(measure, loc="left", size="medium", color=MUTED)
            axes.set_xlabel("step")
            labels = []
            for control in scored.controls:
                value = control.scores[measure].value
                axes.axhline(value, linestyle=":", color=MUTED)
                labels.append(EndLabel(steps[-1], value, control.name.rpartition(", ")[2], MUTED))
            label_ends(axes, labels, in_column=True)
        return image_of(figure, file_format)
