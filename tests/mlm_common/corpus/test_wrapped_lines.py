import textwrap

import pytest

from mlm_common.corpus.wrapped_lines import are_wrapped

WORDS = ["Wort", "und", "Silbe", "Donaudampfschiff", "a", "sehr", "lange", "Reihe"]
TEXT = " ".join(WORDS[number * number % 7] for number in range(3000))


@pytest.mark.parametrize("width", [45, 60, 72, 79])
def test_wrapped_paragraphs(width: int) -> None:
    lines = textwrap.wrap(TEXT, width)
    assert are_wrapped(lines)
    assert are_wrapped(
        [line for start in range(0, len(lines), 6) for line in (*lines[start : start + 6], "short.", "")]
    )


def test_lines_that_end_where_they_want() -> None:
    words = TEXT.split()
    verses = [" ".join(words[start : start + 3 + start % 9]) for start in range(0, 2900, 7)]
    assert not are_wrapped(verses)


@pytest.mark.parametrize("width", [20, 160])
def test_other_widths_are_not_those_of_wrapped_text(width: int) -> None:
    assert not are_wrapped(textwrap.wrap(TEXT, width))


def test_a_few_lines_tell_nothing() -> None:
    assert not are_wrapped(textwrap.wrap(TEXT, 72)[:10])
    assert not are_wrapped(["", " "])


def test_lines_apart_are_documents() -> None:
    assert not are_wrapped([line for text in textwrap.wrap(TEXT, 72) for line in (text, "")])
