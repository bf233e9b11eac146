"""Compute scores of models with standard errors, the scores that chance alone would give, and comparisons of models.

Loss per token depends on the tokenizer: a tokenizer that cuts text into few tokens leads to a high loss per token. Bits
per byte of the text and the fraction of words guessed do not depend on the tokenizer. A score also says little without
the scores of untrained networks: by luck, such a network gets more or less than half of BLiMP's pairs right.
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
# Student's t for 1 to 10 degrees of freedom: by chance, one absolute value in twenty is larger than this.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NUM_QUARTERS = 4


@dataclass(frozen=True)
class Score:
    """The score of a model (a mean, or a ratio of sums, over sampled items), or the mean score of several networks.

    Attributes:
        value: the score.
        standard_error: standard error of the value; infinite for one item, unless the value is a fraction. For
            networks, it is the standard deviation of their scores, which shows how far the score of another such
            network may be from `value`.
        errors: (items,), deviation of each item from `value`, used to compare scores on the same items. For networks:
            (networks,).
        num_items: number of items.
        is_fraction: whether the value is a fraction between 0 and 1.
        num_networks: number of networks; 0 for the score of a model.
    """

    value: float
    standard_error: float
    errors: Values
    num_items: int
    is_fraction: bool
    num_networks: int = 0


@dataclass(frozen=True)
class Scored:
    """The scores of one model or control.

    Attributes:
        name: name of the model or control.
        scores: {measure: score}.
        parts: {measure: {part of the items: score}}.
    """

    name: str
    scores: dict[str, Score]
    parts: dict[str, dict[str, Score]] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredModels:
    """The scores of a model, or of the checkpoints of one run, and of their controls.

    Attributes:
        models: scores of the model, or of the checkpoints in the order of their steps.
        random_weights: mean scores of untrained networks of the same architecture.
        no_context: scores of a guess without context.
        weights_sha256: {model: hash of its `model.safetensors`; None for a model without this file}.
        unread: fraction of the text that the models' tokenizer cannot read.
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
    """The difference between the scores of a model and a baseline, and whether the difference exceeds chance.

    Attributes:
        measure: the measure that is compared.
        model: name of the model.
        baseline: name of the other model or control.
        value: the model's score minus the baseline's.
        standard_error: standard error of the difference.
        degrees_of_freedom: number of items, or networks, from which the error was estimated, minus 1.
    """

    measure: str
    model: str
    baseline: str
    value: float
    standard_error: float
    degrees_of_freedom: int

    @property
    def verdict(self) -> str:
        """Whether the model is better, worse, or not clearly different.

        If the models are in fact equal, the verdict is wrong in at most one comparison in twenty.
        """
        if not abs(self.value) > student_95(self.degrees_of_freedom) * self.standard_error:
            return NO_DIFFERENCE
        return BETTER if (self.value < 0) == (self.measure in LOWER_IS_BETTER) else WORSE


def student_95(degrees_of_freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution.

    For more than ten degrees of freedom, the formula is number 26.7.5 of Abramowitz and Stegun.
    """
    if degrees_of_freedom < 1:
        return math.inf
    if degrees_of_freedom <= len(STUDENT_95):
        return STUDENT_95[degrees_of_freedom - 1]
    x, n = NORMAL_95, degrees_of_freedom
    return x + (x**3 + x) / (4 * n) + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)


def fraction_of(values: Values) -> Score:
    """Return the mean of values between 0 and 1, as a score."""
    value = float(values.mean())
    return Score(value, _standard_error(values, is_fraction=True), values - value, len(values), is_fraction=True)


def quotient_of(numerators: Values, denominators: Values) -> Score:
    """Return a ratio of sums as a score, with the errors of the ratio's linear approximation (Cochran 1977, 2.11)."""
    value = float(numerators.sum() / denominators.sum())
    errors = (numerators - value * denominators) / denominators.mean()
    return Score(value, _standard_error(errors, is_fraction=False), errors, len(errors), is_fraction=False)


def spread_of(scores: Sequence[Score]) -> Score:
    """Return the mean score of several networks, with the standard deviation of their scores."""
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
    """Return the standard error of a fraction that is 0 or 1 (Wilson 1927); the usual estimate would be 0."""
    return NORMAL_95 / (2 * (num_items + NORMAL_95**2))


def score_models(
    questions: Questions, material: Material, runtime: Runtime, kept: KeptAnswers, num_networks: int
) -> ScoredModels:
    """Score the models that the questions are for, networks with random weights, and guesses without context."""
    measurer = Measurer(questions, material, runtime, kept)
    measured_models = measurer.measure_models()
    models = [_scored(name, questions, material, measured) for name, measured in measured_models.items()]
    return ScoredModels(
        models,
        _scored_networks(f"{questions.name}, {RANDOM_WEIGHTS}", measurer.measure_random_networks(num_networks)),
        _scored(f"{questions.name}, {NO_CONTEXT}", questions, material, measure_by_frequency(questions, material)),
        measurer.weights_sha256,
        questions.unread,
    )


def _scored_networks(name: str, networks: Sequence[RandomNetwork]) -> Scored:
    scored_networks = [_scored(name, *network) for network in networks]
    by_measure: dict[str, list[Score]] = defaultdict(list)
    by_part: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for scored in scored_networks:
        for measure, score in scored.scores.items():
            by_measure[measure].append(score)
        for title, parts in scored.parts.items():
            for part, score in parts.items():
                by_part[title][part].append(score)
    return Scored(
        name,
        {measure: spread_of(scores) for measure, scores in by_measure.items()},
        {
            title: {part: spread_of(scores) for part, scores in sorted(parts.items())}
            for title, parts in by_part.items()
        },
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
        quarters = NUM_QUARTERS * questions.offsets // questions.max_length
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
            numbers = defaultdict(list)
            for number, pair in enumerate(material.pairs):
                numbers[getattr(pair, kind)].append(number)
            parts[f"{PAIRS}, by {kind}"] = {
                part: fraction_of(preferred[part_numbers]) for part, part_numbers in sorted(numbers.items()) if part
            }
    return Scored(name, scores, parts)


def comparisons(models: Sequence[ScoredModels]) -> list[Comparison]:
    """Compare each model, in each measure, with its controls and with earlier models.

    A model is compared with all models before it, but a checkpoint after the first only with the previous checkpoint.
    """
    results: list[Comparison] = []
    for index, group in enumerate(models):
        baselines = [(earlier.models[-1], earlier) for earlier in models[:index]]
        for model in group.models:
            for measure in model.scores:
                results.append(_compare_with_networks(measure, model, group))
                results.append(_compare(measure, (model, group), (group.no_context, None)))
                results += [_compare(measure, (model, group), baseline) for baseline in baselines]
            baselines = [(model, group)]
    return results


def _compare_with_networks(measure: str, model: Scored, group: ScoredModels) -> Comparison:
    """Compare a model's score with the mean of random networks: could the model be one more random network?"""
    score, networks = model.scores[measure], group.random_weights.scores[measure]
    error = math.hypot(networks.standard_error * math.sqrt(1 + 1 / networks.num_networks), score.standard_error)
    difference = score.value - networks.value
    return Comparison(measure, model.name, group.random_weights.name, difference, error, networks.num_networks - 1)


def _compare(
    measure: str, model: tuple[Scored, ScoredModels], baseline: tuple[Scored, ScoredModels | None]
) -> Comparison:
    """Compare two scores item by item, so that errors that both share cancel out.

    If one of the two models does not differ from random networks, the difference may be due to lucky initial weights.
    The spread of random networks is then added to the error.
    """
    score, baseline_score = model[0].scores[measure], baseline[0].scores[measure]
    errors = score.errors - baseline_score.errors
    error = _standard_error(errors, is_fraction=score.is_fraction)
    degrees_of_freedom = len(errors) - 1
    for scored, group in (model, baseline):
        if group is not None and _compare_with_networks(measure, scored, group).verdict == NO_DIFFERENCE:
            networks = group.random_weights.scores[measure]
            error = math.hypot(error, networks.standard_error)
            degrees_of_freedom = min(degrees_of_freedom, networks.num_networks - 1)
    difference = score.value - baseline_score.value
    return Comparison(measure, model[0].name, baseline[0].name, difference, error, degrees_of_freedom)
