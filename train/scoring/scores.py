"""The scores of models, with standard errors, and what chance would have scored.

Loss per token depends on the tokenizer: one that cuts text into few tokens has a high loss for each. Bits per byte of
the text and whole words do not. A score also says little without that of the same network before its training: of
BLiMP's pairs such a network gets more than half right, since the better sentence often has fewer tokens.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from train.scoring.answers import Answers, Model
from train.scoring.material import Material
from train.scoring.queries import Query, Questions

Values = NDArray[np.float64]
BITS_PER_BYTE, FIRST_GUESS, FIVE_GUESSES, PAIRS = "bits per byte", "words, 1st guess", "words, 5 guesses", "pairs"
# A difference of more standard errors is chance in one case of twenty.
NORMAL_95 = 1.96
NUM_QUARTERS = 4


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
        """Whether a difference may be none."""
        return abs(self.value) <= NORMAL_95 * self.standard_error


@dataclass(frozen=True)
class Scored:
    """What one model, or one of the controls beside it, scored.

    scores: {measure: score}. parts: {measure: {part of the items: score}}.
    """

    name: str
    scores: dict[str, Score]
    parts: dict[str, dict[str, Score]] = field(default_factory=dict)


def mean_of(values: Values) -> Score:
    return Score(float(values.mean()), values - values.mean())


def quotient_of(numerators: Values, denominators: Values) -> Score:
    """Divide sum by sum; the errors are those of its linear approximation (Cochran 1977, section 2.11)."""
    value = float(numerators.sum() / denominators.sum())
    return Score(value, (numerators - value * denominators) / denominators.mean())


def score_model(questions: Questions, material: Material, strategy: tf.distribute.Strategy) -> list[Scored]:
    """Score a model, then its controls: the same network with random weights, and guesses without any network."""
    num_ids = len(questions.frequencies)
    scored = []
    for name, is_random in ((questions.name, False), (f"{questions.name}, random weights", True)):
        model = Model(questions.folder, strategy, num_ids, questions.pad_token_id, random_weights=is_random)
        answers = {
            kind: model.answer(asked, questions.max_length)
            for kind, asked in (
                ("sentences", questions.of_sentences),
                ("tokens", questions.of_tokens),
                ("words", questions.of_words),
            )
        }
        scored.append(_scored(name, questions, material, answers))
    answers = {
        "sentences": Answers(np.ones(len(questions.of_sentences)), np.zeros(len(questions.of_sentences), np.int32)),
        "tokens": by_frequency(questions.of_tokens, questions.frequencies),
        "words": by_frequency(questions.of_words, questions.frequencies),
    }
    return [*scored, _scored(f"{questions.name}, no context", questions, material, answers)]


def by_frequency(queries: Sequence[Query], frequencies: Values) -> Answers:
    """Answer as one would who knows how frequent each token is, and nothing of the rest of the row."""
    with np.errstate(divide="ignore"):
        of_ids = -np.log(frequencies)
    num_better = np.searchsorted(np.sort(of_ids), of_ids).astype(np.int32)
    return Answers(
        np.array([of_ids[query.targets].sum() for query in queries]),
        np.array([num_better[query.targets].max() for query in queries], np.int32),
    )


def _scored(name: str, questions: Questions, material: Material, answers: dict[str, Answers]) -> Scored:
    scores: dict[str, Score] = {}
    parts: dict[str, dict[str, Score]] = {}
    if material.words:
        num_words = len(material.words)
        bits = total_by_item(questions.of_tokens, answers["tokens"].nats, num_words) / math.log(2)
        num_bytes = np.array([len(material.text_of(word).encode()) for word in material.words], np.float64)
        scores[BITS_PER_BYTE] = quotient_of(bits, num_bytes)
        ranks = np.full(num_words, np.iinfo(np.int32).max)  # of a word without a token
        for query, rank in zip(questions.of_words, answers["words"].ranks, strict=True):
            ranks[query.item] = rank
        for measure, num_guesses in ((FIRST_GUESS, 1), (FIVE_GUESSES, 5)):
            scores[measure] = mean_of((ranks < num_guesses).astype(np.float64))
        quarters = NUM_QUARTERS * questions.places // questions.max_length
        parts[f"{BITS_PER_BYTE}, by place in the row"] = {
            f"quarter {number + 1}": quotient_of(bits[quarters == number], num_bytes[quarters == number])
            for number in range(NUM_QUARTERS)
            if (quarters == number).any()
        }
    if material.pairs:
        nats = total_by_item(questions.of_sentences, answers["sentences"].nats, 2 * len(material.pairs))
        good, bad = nats[::2], nats[1::2]
        preferred = np.where(good == bad, 0.5, (good < bad).astype(np.float64))
        scores[PAIRS] = mean_of(preferred)
        for kind, names in (
            ("field", [pair.field for pair in material.pairs]),
            ("term", [pair.term for pair in material.pairs]),
        ):
            members = defaultdict(list)
            for number, part in enumerate(names):
                members[part].append(number)
            parts[f"{PAIRS}, by {kind}"] = {
                part: mean_of(preferred[of_part]) for part, of_part in sorted(members.items()) if part
            }
    return Scored(name, scores, parts)


def total_by_item(queries: Sequence[Query], nats: Values, num_items: int) -> Values:
    """Add up what was answered about each item, (items,)."""
    totals = np.zeros(num_items)
    np.add.at(totals, [query.item for query in queries], nats)
    return totals


def as_text(models: Sequence[Sequence[Scored]]) -> str:
    """Write tables in Markdown, of what `score_model` returned: scores, those of parts, and what differs from what."""
    scored = [one for of_model in models for one in of_model]
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


def comparisons(models: Sequence[Sequence[Scored]]) -> list[tuple[str, str, str, Score]]:
    """Compare each model with its controls and with the models before it, in each measure."""
    return [
        (measure, model.name, other.name, score.minus(other.scores[measure]))
        for index, (model, *controls) in enumerate(models)
        for measure, score in model.scores.items()
        for other in (*controls, *(before[0] for before in models[:index]))
    ]


def as_json(models: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """Collect scores, errors and comparisons for a file."""

    def record(score: Score) -> dict[str, float]:
        return {"value": score.value, "standard_error": score.standard_error, "items": len(score.errors)}

    return {
        "scores": {
            one.name: {measure: record(score) for measure, score in one.scores.items()}
            | {title: {part: record(score) for part, score in parts.items()} for title, parts in one.parts.items()}
            for of_model in models
            for one in of_model
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
