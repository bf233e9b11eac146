"""Text files of wrapped paragraphs, such as books: to read each line as a document is hardly ever what is meant."""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise

from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.text_files import read_byte_range
from mlm_common.errors import InputError
from mlm_common.storage.reading import StoredFile

logger = logging.getLogger(__name__)

NUM_FILES = 4
NUM_LINES = 500  # of a file
# Most sentences are longer.
SHORT_LINE_BYTES = 80
# Widths, in characters, at which text is wrapped.
MIN_WIDTH, MAX_WIDTH = 40, 100
# Fewer lines than these tell nothing.
MIN_LINES = 20
# Of the lines that another follows: to so many of them its first word was too long to be added.
MIN_SHARE_FULL = 0.7
MAX_WORD_CHARACTERS = 15


def check_lines(files: Iterable[StoredFile]) -> None:
    """Check that the lines of the first .txt files may be documents; warn where they are short.

    Raises:
        InputError: they are lines of wrapped paragraphs.
    """
    texts = [file for file in files if file.name.removesuffix(".gz").endswith(".txt")][:NUM_FILES]
    lines_of = {
        file.name: list(islice(read_byte_range(ByteRange(file), "", "line", "skip"), NUM_LINES)) for file in texts
    }
    advice = "--sample-by paragraph (blank lines separate documents) or --sample-by document (one per file)"
    for name, lines in lines_of.items():
        if are_wrapped(lines):
            raise InputError(
                f"The lines of {name} are those of wrapped paragraphs, and by default each line of a .txt file is a "
                f"document: the model would see one line at a time. Pass {advice}. If each line really is a document, "
                "pass --sample-by line."
            )
    sizes_bytes = [len(line.encode()) for line in chain.from_iterable(lines_of.values()) if line.strip()]
    if sizes_bytes and sum(sizes_bytes) / len(sizes_bytes) < SHORT_LINE_BYTES:
        logger.warning(
            "The lines of %s have %.0f bytes on average, and each is a document. If they are parts of longer texts, "
            "pass %s.",
            texts[0].name,
            sum(sizes_bytes) / len(sizes_bytes),
            advice,
        )


def are_wrapped(lines: Sequence[str]) -> bool:
    """Return whether most lines end where the first word of the next one would not have fitted."""
    widths = sorted(len(line) for line in lines if line.strip())
    if len(widths) < MIN_LINES:
        return False
    width = widths[int(0.95 * len(widths))]  # a few lines may be longer, such as headings
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        return False
    followed = [(line, after.split()[0]) for line, after in pairwise(lines) if line.strip() and after.strip()]
    num_full = sum(len(line.rstrip()) + 1 + min(len(word), MAX_WORD_CHARACTERS) > width for line, word in followed)
    return len(followed) >= len(widths) / 2 and num_full >= MIN_SHARE_FULL * len(followed)
