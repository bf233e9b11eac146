"""Scores of tags against those counted by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import metrics as seqeval
from seqeval.scheme import BILOU

from finetuning.tasks.tagging import baseline, hint_of, metrics_of, scores

REFERENCES = [["B-PER", "I-PER", "O"], ["B-ORG", "O", "B-PER"]]


@settings(max_examples=50)
@given(drawn=st.data())
def test_scores_of_bilou_are_those_of_the_strict_scheme(drawn):
    def tags() -> list[str]:
        lengths = drawn.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        sequence = []
        for length in lengths:
            kind = drawn.draw(st.sampled_from(["PER", "ORG"]))
            entity = ["B-", *["I-"] * (length - 2), "L-"] if length > 1 else ["U-"]
            sequence += [f"{prefix}{kind}" for prefix in entity] if length else ["O"]
        return sequence

    references, predictions = tags(), tags()
    num_words = min(len(references), len(predictions))
    # The shorter one ends with words outside, so that both are whole.
    references += ["O"] * (len(predictions) - num_words)
    predictions += ["O"] * (len(references) - len(predictions))
    names = ("f1", "precision", "recall", "accuracy")
    strict = {"mode": "strict", "scheme": BILOU, "zero_division": 0}
    expected = [
        *(getattr(seqeval, f"{name}_score")([references], [predictions], **strict) for name in names[:3]),
        seqeval.accuracy_score([references], [predictions]),
    ]
    assert list(scores(names, [predictions], [references]).values()) == pytest.approx(expected)


@given(letters=st.sampled_from(["BIO", "BILUO", "BIESO"]), drawn=st.data())
def test_scores_of_entities_without_kind_are_those_of_one_kind(letters, drawn):
    rows = st.lists(st.lists(st.sampled_from(letters), min_size=6, max_size=6), min_size=1, max_size=4)
    references = drawn.draw(rows)
    predictions = [drawn.draw(st.lists(st.sampled_from(letters), min_size=6, max_size=6)) for _ in references]
    named = [[[tag if tag == "O" else f"{tag}-X" for tag in row] for row in part] for part in (predictions, references)]
    metrics = metrics_of(tuple(letters))
    assert metrics[0] == "f1"
    assert scores(metrics, predictions, references) == scores(metrics, *named)


def test_which_metrics_suit_tags():
    assert metrics_of(("A", "B", "I", "O")) == ("accuracy",)
    assert metrics_of(("S", "E")) == ("accuracy",)
    assert metrics_of(("O", "B-X"))[0] == "f1"
    assert metrics_of(("O", "U-X", "L-X", "B-X"))[0] == "f1"
    assert metrics_of(("NOUN", "VERB")) == ("accuracy",)
    assert metrics_of(("NOUN", "VERB", "E-MAIL")) == ("accuracy",)


@pytest.mark.parametrize(
    "names",
    [("O", "PER-B", "PER-I"), ("O", "B_PER", "I_PER", "B_ORG"), ("b-per", "i-per", "o"), ("b", "i", "o")],
)
def test_entities_that_are_written_another_way_get_a_hint(names):
    assert metrics_of(names) == ("accuracy",)
    hint = hint_of(names)
    assert hint is not None
    assert f"Tags such as {names[names[0] == 'O']} look like tags of entities" in hint
    assert "rewrite them as B-PER, I-PER and O" in hint


@pytest.mark.parametrize("names", [("O", "B-PER", "I-PER"), ("NOUN", "E-MAIL", "VERB"), ("NN", "NN_S", "ADJ")])
def test_other_tags_get_no_hint(names):
    assert hint_of(names) is None


def test_a_guess_without_the_text():
    assert baseline(REFERENCES, [["a", "b"], ["c"]]) in ([["O", "O"], ["O"]], [["B-PER", "B-PER"], ["B-PER"]])
