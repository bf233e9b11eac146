"""Which sentence a card shows, and whose text never leaves this machine."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
from transformers import AutoConfig

from tests.fixtures.tiny_models import CONFIGS, tiny_tokenizer
from tests.train.publishing.test_model_card import card, record
from train.config.settings import PretrainingHub
from train.publishing import card_example
from train.publishing.card_example import BUILTIN_EXAMPLE, PLACEHOLDER, example_of, find_example
from train.publishing.model_card import check_card

CLS, SEP = 0, 2
SENTENCE = "A function returns the [MASK] of a value."


def row(tokenizer: Any, *documents: str, begins_within: str = "") -> np.ndarray:
    """Make a row of documents, each in its frame, the first perhaps cut at its begin."""
    ids = [*tokenizer(begins_within, add_special_tokens=False)["input_ids"], *([SEP] if begins_within else [])]
    for text in documents:
        ids += [CLS, *tokenizer(text, add_special_tokens=False)["input_ids"], SEP]
    return np.array(ids)


def test_the_longest_word_of_the_first_plain_sentence_is_masked():
    """Not of one with numbers or unknown characters, nor where a row begins within a document."""
    tokenizer = tiny_tokenizer()
    rows = [
        row(tokenizer, "The value 7 is in the name of a list.", begins_within="The value of a list is a name."),
        row(tokenizer, "The \u20ac is in the name of the list."),
        row(tokenizer, "The list. A function returns the value of a list. The name is a value in a text."),
    ]
    assert find_example(rows, tokenizer) == "A [MASK] returns the value of a list."
    assert find_example(iter(rows), tokenizer) == find_example(rows, tokenizer)
    assert find_example(rows[:2], tokenizer) is None


@pytest.fixture
def with_text(monkeypatch) -> list[str]:
    """Let each folder of shards have a sentence; list the folders that are read."""
    read: list[str] = []

    def first(folder: str, _: Any) -> str:
        read.append(folder)
        return SENTENCE

    monkeypatch.setattr(card_example, "_first_example", first)
    card_example.is_public.cache_clear()
    return read


def with_eval(hub: PretrainingHub, **corpus: Any) -> dict[str, Any]:
    of = record(hub, **corpus)
    of["settings"]["data"]["eval_dataset"] = "/home/alice/private/shards/validation"
    return of


def test_text_that_is_not_known_to_be_public_stays_here(with_text, monkeypatch, caplog):
    """A card that is not pushed has the sentence; one that is pushed a placeholder, with a warning."""
    pushed, kept = PretrainingHub(hub_model_id="alice/tiny"), PretrainingHub()
    assert f'fill_mask("{SENTENCE}")' in card(with_eval(kept))
    with_text.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for corpus in ({}, {"dataset_name": "alice/corpus"}, {"dataset_name": "/home/alice/private"}):
        text = card(with_eval(pushed, **corpus))
        assert f'fill_mask("{PLACEHOLDER}")' in text
        assert "widget" not in text
    assert not with_text
    config = AutoConfig.for_model(**CONFIGS["roberta"])
    check_card(with_eval(pushed), tiny_tokenizer(), config)
    assert "--hub-example" in caplog.text
    assert "--hub-language" in caplog.text
    caplog.clear()
    stated = PretrainingHub(hub_model_id="alice/tiny", hub_example=SENTENCE, hub_language=["en"])
    check_card(with_eval(stated), tiny_tokenizer(), config)
    assert not caplog.records


@pytest.mark.parametrize(
    ("private", "gated", "is_shown"), [(False, False, True), (True, False, False), (False, "auto", False)]
)
def test_text_of_a_public_data_set_of_the_hub_is_shown(private, gated, is_shown, with_text, monkeypatch):
    api = Mock()
    api.return_value.dataset_info.return_value = SimpleNamespace(private=private, gated=gated)
    monkeypatch.setattr("huggingface_hub.HfApi", api)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    of = with_eval(PretrainingHub(hub_model_id="alice/tiny"), dataset_name="alice/corpus")
    assert example_of(of, tiny_tokenizer()) == (SENTENCE if is_shown else None)
    assert bool(with_text) == is_shown
    api.assert_called_once_with(token=False)
    api.return_value.dataset_info.assert_called_once_with("alice/corpus", timeout=ANY)


def test_what_the_user_gives_and_the_builtin_corpus(with_text):
    given = PretrainingHub(hub_model_id="alice/tiny", hub_example="Das ist [MASK].")
    assert example_of(with_eval(given), tiny_tokenizer()) == "Das ist [MASK]."
    built_in = with_eval(PretrainingHub(hub_model_id="alice/tiny"), dataset_name="builtin")
    assert example_of(built_in, tiny_tokenizer()) == BUILTIN_EXAMPLE
    assert not with_text


def test_without_shards_there_is_no_example(tmp_path):
    of = with_eval(PretrainingHub())
    for folder in (str(tmp_path), None):
        of["settings"]["data"]["eval_dataset"] = folder
        assert example_of(of, tiny_tokenizer()) is None
