import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.scoring.answers import by_frequency
from train.scoring.queries import Query, total_by_item
from train.scoring.scores import Score, Scored, ScoredModels, as_text, mean_of, quotient_of

NUMBERS = st.lists(st.floats(0, 10, width=32), min_size=2, max_size=20)


@given(NUMBERS)
def test_a_mean_has_the_usual_standard_error(numbers):
    score = mean_of(np.array(numbers))
    assert score.value == pytest.approx(np.mean(numbers))
    assert score.standard_error == pytest.approx(np.std(numbers, ddof=1) / math.sqrt(len(numbers)))


@given(NUMBERS)
def test_a_quotient_over_equal_sizes_is_a_mean(numbers):
    score, mean = quotient_of(np.array(numbers), np.full(len(numbers), 4.0)), mean_of(np.array(numbers) / 4)
    assert score.value == pytest.approx(mean.value)
    assert score.standard_error == pytest.approx(mean.standard_error, abs=1e-9)


def test_the_error_of_a_quotient_is_that_of_repeated_draws():
    random = np.random.default_rng(1)
    sizes = random.integers(1, 12, (4000, 200)).astype(float)
    bits = sizes * 2 + random.normal(0, 1, sizes.shape) * sizes
    scores = [quotient_of(one, size) for one, size in zip(bits, sizes, strict=True)]
    spread = np.std([score.value for score in scores])
    assert np.mean([score.standard_error for score in scores]) == pytest.approx(spread, rel=0.05)


def test_what_two_models_share_is_no_difference_between_them():
    hard = np.random.default_rng(2).normal(0, 5, 100)  # words are hard or easy for both
    one, other = mean_of(hard), mean_of(hard + 0.1)
    assert not other.minus(one).is_chance
    assert other.minus(one).value == pytest.approx(0.1)
    assert other.standard_error > 0.4
    assert one.minus(mean_of(hard)).is_chance


def test_frequencies_answer_with_the_commonest_first():
    queries = [Query(0, [], [], [2]), Query(1, [], [], [0, 1])]
    answers = by_frequency(queries, np.array([0.25, 0.25, 0.5, 0.0]))
    assert answers.nats == pytest.approx([math.log(2), 2 * math.log(4)])
    assert answers.ranks.tolist() == [0, 1]  # equal frequencies share a rank
    assert total_by_item(queries, answers.nats, 3).tolist() == [*answers.nats, 0]


def test_each_model_is_compared_with_its_controls_and_those_before_it():
    errors = np.array([0.1, -0.1, 0.0, 0.0])
    models = [
        ScoredModels(one[:1], one[1:], {})
        for one in (
            [Scored(name, {"pairs": Score(value, errors * factor)}) for name, value, factor in of_model]
            for of_model in (
                (("a", 0.9, 1), ("a, random weights", 0.5, 2), ("a, no context", 0.5, 3)),
                (("b", 0.9, 1), ("b, random weights", 0.5, 2), ("b, no context", 0.9, 2)),
            )
        )
    ]
    text = as_text(models)
    assert "| a | 0.900 ± 0.041 |" in text
    assert "pairs: a +0.4000 ± 0.0408 beside a, random weights: differs" in text
    assert "pairs: b +0.0000 ± 0.0000 beside a: does not differ" in text
    assert "pairs: b +0.0000 ± 0.0408 beside b, no context: does not differ" in text
