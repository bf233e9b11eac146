"""Documents as passages of bounded length, and in groups of bounded size."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from mlm_common.errors import InputError

Item = TypeVar("Item")

MAX_PASSAGE_CHARACTERS = 4096


def cut_passages(documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents in order, one of more than 4,096 characters cut: at spaces, where it has any."""
    for document in documents:
        start = 0
        while len(document) - start > MAX_PASSAGE_CHARACTERS:
            end = start + MAX_PASSAGE_CHARACTERS
            space = max(document.rfind(" ", start, end), document.rfind("\n", start, end))
            end = space + 1 if space >= start else end
            yield document[start:end]
            start = end
        yield document[start:] if start else document


def grouped(sized_items: Iterable[tuple[Item, int]], max_size: int) -> Iterator[list[Item]]:
    """Yield the items of (item, size) in order, in groups of at most `max_size`, a larger one in a group of its own."""
    group: list[Item] = []
    group_size = 0
    for item, size in sized_items:
        if group and group_size + size > max_size:
            yield group
            group, group_size = [], 0
        group.append(item)
        group_size += size
    if group:
        yield group


def grouped_by_size(documents: Iterable[str], max_bytes: int) -> Iterator[list[str]]:
    """Yield the documents in order, in groups of at most `max_bytes` of UTF-8, a larger one in a group of its own.

    Raises:
        InputError: a document is not valid Unicode; says which.
    """
    # One more each, so that blank documents have a size, too.
    sized = ((document, num_utf8_bytes(document, number) + 1) for number, document in enumerate(documents, start=1))
    return grouped(sized, max_bytes)


def num_utf8_bytes(document: str, number: int) -> int:
    """Measure the size of document number `number` in UTF-8.

    Raises:
        InputError: it is not valid Unicode.
    """
    try:
        return len(document.encode())
    except UnicodeEncodeError as error:
        raise InputError(
            f"Documents must be valid Unicode; number {number:,} is not: {error}. Remove it from the corpus."
        ) from error
