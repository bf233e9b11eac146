import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.scoring.measure import by_frequency
from train.scoring.queries import Query, Unread, total_by_item
from train.scoring.scores import (
    Scored,
    ScoredModels,
    comparisons,
    fraction_of,
    quotient_of,
    spread_of,
    student_95,
)
from train.scoring.tables import as_json, as_text

NUMBERS = st.lists(st.floats(0, 10, width=32), min_size=2, max_size=20)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=40))
def test_a_fraction_has_the_usual_standard_error_but_never_none(numbers):
    score = fraction_of(np.array(numbers))
    usual = np.std(numbers, ddof=1) / math.sqrt(len(numbers))
    assert score.value == pytest.approx(np.mean(numbers))
    assert score.standard_error == pytest.approx(max(usual, 1.96 / (2 * (len(numbers) + 1.96**2))))


@pytest.mark.parametrize("num_items", [1, 2, 50, 2000])
def test_the_error_of_none_or_all_right_is_that_of_wilsons_interval(num_items):
    from scipy.stats import binomtest

    for num_right in (0, num_items):
        interval = binomtest(num_right, num_items).proportion_ci(method="wilson")
        error = fraction_of(np.full(num_items, num_right / num_items)).standard_error
        assert error == pytest.approx((interval.high - interval.low) / 2 / 1.96, rel=1e-4)


def test_quantiles_are_those_of_students_t():
    from scipy.stats import t

    assert student_95(0) == math.inf
    for degrees_of_freedom in (*range(1, 60), 1000):
        assert student_95(degrees_of_freedom) == pytest.approx(t.ppf(0.975, degrees_of_freedom), rel=1e-3)


@given(NUMBERS)
def test_a_quotient_over_equal_sizes_is_a_mean(numbers):
    score = quotient_of(np.array(numbers), np.full(len(numbers), 4.0))
    assert score.value == pytest.approx(np.mean(numbers) / 4)
    usual = np.std(np.array(numbers) / 4, ddof=1) / math.sqrt(len(numbers))
    assert score.standard_error == pytest.approx(usual, abs=1e-9)


def test_the_error_of_a_quotient_is_that_of_repeated_draws():
    random = np.random.default_rng(1)
    sizes = random.integers(1, 12, (4000, 200)).astype(float)
    bits = sizes * 2 + random.normal(0, 1, sizes.shape) * sizes
    scores = [quotient_of(drawn_bits, size) for drawn_bits, size in zip(bits, sizes, strict=True)]
    spread = np.std([score.value for score in scores])
    assert np.mean([score.standard_error for score in scores]) == pytest.approx(spread, rel=0.05)


def test_frequencies_answer_with_the_commonest_first():
    queries = [Query(0, [], [], [2]), Query(1, [], [], [0, 1])]
    answers = by_frequency(queries, np.array([0.25, 0.25, 0.5, 0.0]))
    assert answers.nats == pytest.approx([math.log(2), 2 * math.log(4)])
    assert answers.ranks.tolist() == [0, 1]  # equal frequencies share a rank
    assert total_by_item(queries, answers.nats, 3).tolist() == [*answers.nats, 0]


def group(name, score, networks, no_context=None, measure="pairs"):
    """Put a model between its controls; its score may be those of several checkpoints."""
    scores = score if isinstance(score, list) else [score]
    names = [name] if not isinstance(score, list) else [f"{name}, step {step}" for step in range(len(score))]
    return ScoredModels(
        [Scored(label, {measure: result}) for label, result in zip(names, scores, strict=True)],
        Scored(f"{name}, random weights", {measure: spread_of(networks)}),
        Scored(f"{name}, no context", {measure: no_context or scores[0]}),
        dict.fromkeys(names),
        Unread(0.0, 0.0),
    )


def verdicts(*groups):
    return {(comparison.model, comparison.baseline): comparison.verdict for comparison in comparisons(groups)}


def test_two_networks_that_know_nothing_differ_in_at_most_one_of_twenty_comparisons():
    """Of networks with the luck of those in BLiMP's pairs; beside their controls, and beside each other."""
    random = np.random.default_rng(4)

    def network(num_pairs):
        return fraction_of((random.random(num_pairs) < random.normal(0.5, 0.0255)).astype(float))

    differing, num_trials = np.zeros(2), 1500
    for _ in range(num_trials):
        networks = [network(1000) for _ in range(8)]
        outcomes = verdicts(group("a", network(3000), networks), group("b", network(3000), networks))
        differing += [outcomes["a", "a, random weights"] != "no difference", outcomes["b", "a"] != "no difference"]
    assert (differing / num_trials < 0.05 + 2 * math.sqrt(0.05 * 0.95 / num_trials)).all()
    assert differing[0] / num_trials > 0.01  # it is no verdict that never comes


def test_what_two_models_share_is_no_difference_between_them():
    hard = np.random.default_rng(2).normal(0, 5, 100)  # units are hard or easy for both
    size, networks = np.ones(100), [quotient_of(np.full(100, 50.0 + offset), np.ones(100)) for offset in range(3)]
    better, worse = quotient_of(10 + hard, size), quotient_of(10.1 + hard, size)
    assert worse.standard_error > 0.4
    outcomes = verdicts(
        group("a", better, networks, measure="bits per byte"), group("b", worse, networks, better, "bits per byte")
    )
    assert outcomes["b", "a"] == "worse"
    assert outcomes["b", "b, no context"] == "worse"
    assert outcomes["a", "a, random weights"] == "better"
    assert outcomes["a", "a, no context"] == "no difference"


def test_the_luck_of_a_network_that_is_like_random_ones_counts_beside_others():
    values = np.tile([0.0, 1.0], 500)
    networks = [fraction_of(np.roll(np.arange(1000) < 1000 * share, 1).astype(float)) for share in (0.45, 0.5, 0.55)]
    better = values.copy()
    better[:80:2] = 1  # by 0.04
    outcomes = verdicts(group("a", fraction_of(values), networks), group("b", fraction_of(better), networks))
    assert outcomes["b", "a"] == "no difference"
    steady = [fraction_of(values[:100])] * 3
    apart = verdicts(
        group("a", fraction_of(np.ones(1000)), steady), group("b", fraction_of(np.append(better, [])), steady)
    )
    assert apart["b", "a"] == "worse"


def test_few_items_show_no_difference():
    for num_items in (1, 2):
        right, wrong = (fraction_of(np.full(num_items, score)) for score in (1.0, 0.0))
        bits = quotient_of(np.arange(num_items) + 1.0, np.ones(num_items))
        assert verdicts(group("a", right, [wrong] * 8, wrong))["a", "a, no context"] == "no difference"
        outcomes = verdicts(group("a", bits, [bits] * 2, bits, measure="bits per byte"))
        assert set(outcomes.values()) == {"no difference"}


def test_each_model_is_compared_with_its_controls_and_those_before_it():
    items = np.tile([1.0, 1.0, 1.0, 0.0], 100)
    high, low = fraction_of(items), fraction_of(1 - items)
    networks = [fraction_of(np.arange(400) % 2.0)] * 4
    groups = [group("a/x", high, networks, low), group("a/y", low, networks, high)]
    text = as_text(groups, num_equal_pairs=7)
    assert "| a/x                 | 0.750 ± 0.022 * |" in text
    assert "| a/y                 | 0.250 ± 0.022 ! |" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [row for row in rows if " compared with " in row[0]] == [
        ["a/x compared with random weights", "better by 0.2500 ± 0.0218"],
        ["a/x compared with no context", "better by 0.5000 ± 0.0434"],
        ["a/y compared with random weights", "worse by 0.2500 ± 0.0218"],
        ["a/y compared with no context", "worse by 0.5000 ± 0.0434"],
        ["a/y compared with a/x", "worse by 0.5000 ± 0.0434"],
    ]
    assert "pairs of two equal sentences: 7, each counted as half right" in text
    assert [difference["verdict"] for difference in as_json(groups)["differences"]] == ["better"] * 2 + ["worse"] * 3


def test_a_table_by_part_has_a_line_for_each_part_and_a_column_for_each_model():
    """So the number of terms, of which BLiMP has 12, does not make it wide."""
    terms = [f"term {number}" for number in range(12)]
    groups = []
    for number, name in enumerate(("work/x/export", "work/y/export")):
        models = group(name, fraction_of(np.tile([1.0, 0.0], 8)), [fraction_of(np.tile([1.0, 0.0], 8))] * 2)
        for scored in (*models.models, *models.controls):
            shares = (np.arange(16) < index + number for index in range(len(terms)))
            scored.parts["pairs, by term"] = {
                term: fraction_of(share.astype(float)) for term, share in zip(terms, shares, strict=True)
            }
        groups.append(models)
    table = as_text(groups).split("\n\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert cells[0] == [
        "pairs, by term",
        *(f"{name}/export{kind}" for name in "xy" for kind in ("", ", random weights", ", no context")),
    ]
    assert [row[0] for row in cells[2:]] == terms
    assert [row[1].split()[0] for row in cells[2:]] == [f"{index / 16:.3f}" for index in range(12)]
    assert [row[4].split()[0] for row in cells[2:]] == [f"{(index + 1) / 16:.3f}" for index in range(12)]
