"""Text cut into sentences by a rule that needs no model."""

from typing import Literal

import regex

SentencesBy = Literal["punctuation", "line"]
# What Unicode calls the end of a sentence, or an ellipsis, with the quotes and brackets that close after it: before
# white space and anything but a small letter; in Chinese and Japanese wherever it stands. German quotes close with
# characters that Unicode calls initial (Pi).
SENTENCE_END = regex.compile(
    r"""[\p{STerm}…]+[\p{Pe}\p{Pf}\p{Pi}"']*(?=\s+\P{Ll})|[\u3002\uff01\uff1f\uff61]+[\p{Pe}\p{Pf}"']*"""
)


def sentences_of(text: str, by: SentencesBy) -> list[str]:
    """Cut a text into sentences, without the white space between them; one that is empty where the text is blank.

    Args:
        text: of a document.
        by: `line`: each line is one. `punctuation`: a line may have several, which `SENTENCE_END` tells apart.
    """
    sentences = [sentence.strip() for line in text.split("\n") for sentence in _sentences_of_line(line, by)]
    return [sentence for sentence in sentences if sentence] or [""]


def _sentences_of_line(line: str, by: SentencesBy) -> list[str]:
    if by == "line":
        return [line]
    ends = [match.end() for match in SENTENCE_END.finditer(line)]
    return [line[start:end] for start, end in zip([0, *ends], [*ends, len(line)], strict=True)]
