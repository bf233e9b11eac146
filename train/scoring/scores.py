"""The scores of models, with standard errors, what chance would have scored, and which of two is better.

Loss per token depends on the tokenizer: one that cuts text into few tokens has a high loss for each. Bits per byte of
the text and whole words do not. A score also says little without that of networks before their training: of BLiMP's
pairs such a network gets more or less than half right, by its luck.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from train.runtime.runtime import Runtime
from train.scoring.measure import KeptAnswers, Measured, Measurer, RandomNetwork, measure_by_frequency
from train.scoring.queries import Material, Questions, Unread

Values = NDArray[np.float64]
BITS_PER_BYTE, FIRST_GUESS, FIVE_GUESSES, PAIRS = "bits per byte", "words, 1st guess", "words, 5 guesses", "pairs"
LOWER_IS_BETTER = (BITS_PER_BYTE,)
RANDOM_WEIGHTS, NO_CONTEXT = "random weights", "no context"
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference"
NORMAL_95 = 1.96
# Student's t for 1 to 10 degrees of freedom: a larger value, of either sign, is chance in one case of twenty.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NUM_QUARTERS = 4


@dataclass(frozen=True)
class Score:
    """A mean, or a quotient of sums, over items that were drawn; or the mean of networks that were drawn.

    standard_error: of the value; infinite for one item. For networks, their standard deviation: the question is where
    another such network would be.
    errors: (items,), how far each item is from `value`; by them scores of the same items are compared. Those of
    networks, (networks,).
    num_networks: 0 if the items are words or pairs.
    """

    value: float
    standard_error: float
    errors: Values
    num_items: int
    is_fraction: bool
    num_networks: int = 0


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
    unread: what their tokenizer cannot read of the text.
    """

    models: list[Scored]
    random_weights: Scored
    no_context: Scored
    weights_sha256: dict[str, str | None]
    unread: Unread

    @property
    def controls(self) -> tuple[Scored, Scored]:
        return self.random_weights, self.no_context


@dataclass(frozen=True)
class Comparison:
    """By how much a score is above another one, and whether that is more than chance.

    value, standard_error: of the difference.
    degrees_of_freedom: of the items, or of the networks, that the error was estimated from.
    """

    measure: str
    of: str
    beside: str
    value: float
    standard_error: float
    degrees_of_freedom: int

    @property
    def verdict(self) -> str:
        """Say which is better; by chance in at most one of twenty comparisons of equals."""
        if not abs(self.value) > student_95(self.degrees_of_freedom) * self.standard_error:
            return NO_DIFFERENCE
        return BETTER if (self.value < 0) == (self.measure in LOWER_IS_BETTER) else WORSE


def student_95(degrees_of_freedom: int) -> float:
    """Return the 97.5% quantile of Student's t; by its expansion (Abramowitz and Stegun 26.7.5) from 11 on."""
    if degrees_of_freedom < 1:
        return math.inf
    if degrees_of_freedom <= len(STUDENT_95):
        return STUDENT_95[degrees_of_freedom - 1]
    x, n = NORMAL_95, degrees_of_freedom
    return x + (x**3 + x) / (4 * n) + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)


def fraction_of(values: Values) -> Score:
    """Average values from 0 to 1."""
    value = float(values.mean())
    return Score(value, _standard_error(values, is_fraction=True), values - value, len(values), is_fraction=True)


def quotient_of(numerators: Values, denominators: Values) -> Score:
    """Divide sum by sum; the errors are those of its linear approximation (Cochran 1977, section 2.11)."""
    value = float(numerators.sum() / denominators.sum())
    errors = (numerators - value * denominators) / denominators.mean()
    return Score(value, _standard_error(errors, is_fraction=False), errors, len(errors), is_fraction=False)


def spread_of(scores: Sequence[Score]) -> Score:
    """Average the scores of networks, with the standard deviation between them."""
    values = np.array([score.value for score in scores])
    value, num_items = float(values.mean()), round(np.mean([score.num_items for score in scores]))
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.inf
    if scores[0].is_fraction:
        spread = max(spread, _smallest_error(num_items))
    return Score(value, spread, values - value, num_items, scores[0].is_fraction, num_networks=len(scores))


def _standard_error(errors: Values, *, is_fraction: bool) -> float:
    num_items = len(errors)
    error = float(np.std(errors, ddof=1)) / math.sqrt(num_items) if num_items > 1 else math.inf
    smallest = _smallest_error(num_items)
    return (max(error, smallest) if num_items > 1 else smallest) if is_fraction else error


def _smallest_error(num_items: int) -> float:
    """Return the error of a fraction of 0 or 1, where the usual one is 0: that of Wilson's interval (1927)."""
    return NORMAL_95 / (2 * (num_items + NORMAL_95**2))


def score_models(
    questions: Questions, material: Material, runtime: Runtime, kept: KeptAnswers, num_networks: int
) -> ScoredModels:
    """Score the models that the questions are for, and beside them networks with random weights and mere guesses."""
    measurer = Measurer(questions, material, runtime, kept)
    models = [_scored(name, questions, material, one) for name, one in measurer.of_models().items()]
    return ScoredModels(
        models,
        _scored_networks(f"{questions.name}, {RANDOM_WEIGHTS}", measurer.of_random_weights(num_networks)),
        _scored(f"{questions.name}, {NO_CONTEXT}", questions, material, measure_by_frequency(questions, material)),
        measurer.weights_sha256,
        questions.unread,
    )


def _scored_networks(name: str, networks: Sequence[RandomNetwork]) -> Scored:
    scored = [_scored(name, *network) for network in networks]
    by_part: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for one in scored:
        for title, parts in one.parts.items():
            for part, score in parts.items():
                by_part[title][part].append(score)
    return Scored(
        name,
        {
            measure: spread_of([one.scores[measure] for one in scored if measure in one.scores])
            for measure in dict.fromkeys(measure for one in scored for measure in one.scores)
        },
        {title: {part: spread_of(ones) for part, ones in sorted(parts.items())} for title, parts in by_part.items()},
    )


def _scored(name: str, questions: Questions, material: Material, measured: Measured) -> Scored:
    scores: dict[str, Score] = {}
    parts: dict[str, dict[str, Score]] = {}
    if material.units:
        bits, num_bytes = measured.units / math.log(2), material.num_bytes
        scores[BITS_PER_BYTE] = quotient_of(bits, num_bytes)
        if (has_word := material.has_word).any():
            for measure, num_guesses in ((FIRST_GUESS, 1), (FIVE_GUESSES, 5)):
                scores[measure] = fraction_of((measured.ranks[has_word] < num_guesses).astype(np.float64))
        quarters = NUM_QUARTERS * questions.places // questions.max_length
        parts[f"{BITS_PER_BYTE}, by place in the row"] = {
            f"quarter {number + 1}": quotient_of(bits[quarters == number], num_bytes[quarters == number])
            for number in range(NUM_QUARTERS)
            if (quarters == number).any()
        }
    if material.pairs:
        good, bad = measured.sentences[::2], measured.sentences[1::2]
        preferred = np.where(good == bad, 0.5, (good < bad).astype(np.float64))
        scores[PAIRS] = fraction_of(preferred)
        for kind in ("field", "term"):
            members = defaultdict(list)
            for number, pair in enumerate(material.pairs):
                members[getattr(pair, kind)].append(number)
            parts[f"{PAIRS}, by {kind}"] = {
                part: fraction_of(preferred[of_part]) for part, of_part in sorted(members.items()) if part
            }
    return Scored(name, scores, parts)


def comparisons(models: Sequence[ScoredModels]) -> list[Comparison]:
    """Compare each model with its controls and the models before it, a checkpoint with the one before; by measure."""
    compared: list[Comparison] = []
    for index, group in enumerate(models):
        before = [(earlier.models[-1], earlier) for earlier in models[:index]]
        for model in group.models:
            for measure in model.scores:
                compared.append(_beside_networks(measure, model, group))
                compared.append(_beside(measure, (model, group), (group.no_context, None)))
                compared += [_beside(measure, (model, group), other) for other in before]
            before = [(model, group)]
    return compared


def _beside_networks(measure: str, model: Scored, group: ScoredModels) -> Comparison:
    """Compare a model with random networks: whether it could be one more of them."""
    score, networks = model.scores[measure], group.random_weights.scores[measure]
    error = math.hypot(networks.standard_error * math.sqrt(1 + 1 / networks.num_networks), score.standard_error)
    difference = score.value - networks.value
    return Comparison(measure, model.name, group.random_weights.name, difference, error, networks.num_networks - 1)


def _beside(measure: str, one: tuple[Scored, ScoredModels], other: tuple[Scored, ScoredModels | None]) -> Comparison:
    """Compare two scores item by item, so that what they share cancels.

    Where a model does not differ from random networks, neither does its difference to others say more than their luck:
    their spread is added.
    """
    (of, _), (beside, _) = one, other
    errors = of.scores[measure].errors - beside.scores[measure].errors
    error = _standard_error(errors, is_fraction=of.scores[measure].is_fraction)
    degrees_of_freedom = len(errors) - 1
    for model, group in (one, other):
        if group is not None and _beside_networks(measure, model, group).verdict == NO_DIFFERENCE:
            networks = group.random_weights.scores[measure]
            error = math.hypot(error, networks.standard_error)
            degrees_of_freedom = min(degrees_of_freedom, networks.num_networks - 1)
    difference = of.scores[measure].value - beside.scores[measure].value
    return Comparison(measure, of.name, beside.name, difference, error, degrees_of_freedom)
