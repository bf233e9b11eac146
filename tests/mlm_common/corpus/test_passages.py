"""Documents cut into passages and gathered in groups, both of bounded size."""

import json
from collections.abc import Iterator
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.corpus import passages
from mlm_common.corpus.passages import MAX_PASSAGE_CHARACTERS, cut_passages, grouped_by_size
from mlm_common.errors import InputError

BROKEN = json.loads('"half of a pair: \\ud83d"')


@pytest.fixture
def short_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "MAX_PASSAGE_CHARACTERS", 8)


@pytest.mark.usefixtures("short_passages")
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("", [""]),
        ("exactly8", ["exactly8"]),
        ("one two three", ["one two ", "three"]),
        ("one\ntwo three", ["one\ntwo ", "three"]),
        ("one two\nthree four", ["one two\n", "three ", "four"]),
        ("threeletters and", ["threelet", "ters and"]),
        ("a threelettersword", ["a ", "threelet", "tersword"]),
        ("12345678 9", ["12345678", " 9"]),
        ("        " * 2, ["        ", "        "]),
    ],
)
def test_cuts(document: str, expected: list[str]) -> None:
    assert list(cut_passages(["before", document, "after"])) == ["before", *expected, "after"]


@given(st.lists(st.text(st.sampled_from("abcd \n"), max_size=60), max_size=5), st.integers(1, 12))
def test_passages_keep_the_text_and_their_bound(documents: list[str], max_characters: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "MAX_PASSAGE_CHARACTERS", max_characters)
        for document in documents:
            cut = list(cut_passages([document]))
            assert "".join(cut) == document
            assert all(len(passage) <= max_characters for passage in cut)
            if all(len(word) < max_characters for word in document.split()):
                assert list(chain.from_iterable(map(str.split, cut))) == document.split(), "a word was cut"
        assert list(cut_passages(documents)) == list(
            chain.from_iterable(cut_passages([document]) for document in documents)
        )


def test_long_document_without_spaces() -> None:
    document = "天地" * MAX_PASSAGE_CHARACTERS + "玄"
    assert [len(passage) for passage in cut_passages([document])] == [MAX_PASSAGE_CHARACTERS] * 2 + [1]


def test_documents_are_taken_as_passages_leave() -> None:
    def documents() -> Iterator[str]:
        yield "first"
        raise AssertionError("read too far ahead")

    assert next(cut_passages(documents())) == "first"


@given(documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]))), max_bytes=st.integers(1, 30))
def test_groups_keep_all_documents_and_their_bound(documents: list[str], max_bytes: int) -> None:
    groups = list(grouped_by_size(documents, max_bytes))
    assert list(chain.from_iterable(groups)) == documents
    for group in groups:
        assert len(group) == 1 or sum(len(document.encode()) + 1 for document in group) <= max_bytes
    for group, after in pairwise(groups):
        assert sum(len(document.encode()) + 1 for document in [*group, after[0]]) > max_bytes, "closed too early"


def test_broken_unicode_is_named() -> None:
    with pytest.raises(InputError, match="valid Unicode; number 2 is not"):
        list(grouped_by_size(["fine", BROKEN], 100))
