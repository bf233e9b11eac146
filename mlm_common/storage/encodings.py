"""Decode text files in UTF-8 or in the encoding that a byte-order mark names, and say how to convert other files."""

import codecs
import re
import unicodedata

# {first bytes of a text: its encoding}. Longer marks come first, because one of them starts with a shorter mark.
BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
UTF8 = "UTF-8"
# An error's hint names the encoding that is guessed from at most this number of bytes.
NUM_BYTES_CHECKED = 1 << 20
# Unicode categories of characters that are rare in text. Content with a larger fraction of such characters is not
# accepted as text.
NO_TEXT, MAX_ODD_SHARE = ("Cc", "Cn", "Co", "Cs"), 0.01
# Largest fraction of zero bytes in UTF-8 with stray zeros. UTF-16 has more zero bytes, or has control characters.
MAX_ZERO_SHARE = 0.1
_LINE_END = re.compile(rb"\r\n|\r|\n")
_UTF8_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_RUN = re.compile(rb"[\x80-\xff]+")


class TextEncodingError(ValueError):
    """Bytes that are not text in a known encoding.

    Attributes:
        line: line of the first such byte, from 1 on.
        problem: completes the sentence "line N …".
        hint: sentence that says how to convert the file.
    """

    def __init__(self, line: int, problem: str, hint: str) -> None:
        super().__init__(f"line {line:,} {problem}")
        self.line, self.problem, self.hint = line, problem, hint


def encoding_of_mark(start: bytes) -> str | None:
    """Return the encoding that a byte-order mark names, such as `UTF-16`; None for UTF-8's mark, or without a mark."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)


def codec_of(start: bytes) -> str:
    """Return Python's codec for a text that starts with these bytes. The codec drops the byte-order mark."""
    return (encoding_of_mark(start) or "utf-8-sig").lower()


def decode_text(content: bytes) -> tuple[str, str]:
    """Decode a whole file; return its text, without a byte-order mark, and the name of its encoding.

    Raises:
        TextEncodingError: the file is damaged, or is not UTF-8 and has no byte-order mark.
    """
    encoding = encoding_of_mark(content)
    if encoding is None and b"\0" in content:
        line = 1 + len(_LINE_END.findall(content, 0, content.index(0)))
        raise TextEncodingError(line, "has a zero byte, which UTF-8 text does not have", conversion_hint(content))
    try:
        return content.decode(codec_of(content)), encoding or UTF8
    except UnicodeDecodeError as error:
        if encoding is not None:
            problem = f"is not valid {encoding}, which the byte-order mark names ({error.reason})"
            num_lines = error.object.decode(encoding, "replace")[: error.start // 2].count("\n")
            raise TextEncodingError(num_lines + 1, problem, "Make or fetch the file again.") from error
        start = error.start + (len(content) - len(error.object))  # the codec drops UTF-8's mark before it counts
        line = 1 + len(_LINE_END.findall(content, 0, start))
        problem = f"has the byte 0x{content[start]:02x}, which is not UTF-8"
        around = content if start < NUM_BYTES_CHECKED else content[start - NUM_BYTES_CHECKED // 2 :]
        raise TextEncodingError(line, problem, conversion_hint(around)) from error


def is_unicode(text: str) -> bool:
    """Return whether a text is free of unpaired surrogates, which no tokenizer accepts."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def conversion_hint(content: bytes, *, is_line: bool = False) -> str:
    """Guess the encoding of bytes that are not UTF-8, and return a sentence that says how to convert them.

    Args:
        content: the start of a file, or a line of it.
        is_line: whether the content is a line, so that the rest of the file may be UTF-8.
    """
    marked = encoding_of_mark(content)
    content = content[:NUM_BYTES_CHECKED].removeprefix(b"\xef\xbb\xbf")
    if marked is None and has_stray_zeros(content):
        return "The rest is text in UTF-8. Remove the zero bytes, for example with `tr -d '\\000'`."
    encoding = marked or _encoding_of_zeros(content)
    if encoding is not None:
        return f"Convert it: `iconv -f {encoding} -t UTF-8`."
    if b"\0" in content:
        return "It may be a binary file."
    num_valid = len(_UTF8_CHARACTER.findall(content))
    runs = [len(run) for run in _RUN.findall(_UTF8_CHARACTER.sub(b"", content))]
    if num_valid > sum(runs):
        return "Other lines are UTF-8, so correct this line."
    advice = "Save it as UTF-8, or convert it"
    if is_line:
        advice = "Correct this line or, if the whole file is in a different encoding, convert the file"
    # Accented letters of Western Europe are mostly single bytes among ASCII; in other scripts such bytes form runs.
    if runs and sum(runs) < 1.8 * len(runs):
        return f"{advice}: `iconv -f WINDOWS-1252 -t UTF-8` if it comes from Windows in Western Europe."
    return f"{advice}: `iconv -f ENCODING -t UTF-8`, where ENCODING is for example GB18030, SHIFT_JIS or WINDOWS-1251."


def _encoding_of_zeros(content: bytes) -> str | None:
    """Guess the encoding of text with zero bytes: UTF-16 or UTF-32, and the byte order; None if it is not text.

    The right byte order gives characters from fewer Unicode blocks, because the characters of a script are neighbors.
    """
    start = content[: 4 * (min(len(content), 4096) // 4)]
    if b"\0" not in start:
        return None
    blocks = {name: _blocks_of_text(start, name) for name in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")}
    readable = {name: numbers for name, numbers in blocks.items() if numbers is not None}
    return min(readable, key=lambda name: len(readable[name]), default=None)


def _blocks_of_text(content: bytes, encoding: str) -> set[int] | None:
    """Return the Unicode blocks of the characters in some bytes; None if they are not text.

    The last character may be cut off.
    """
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(content)
    except UnicodeDecodeError:
        return None
    num_odd = sum(unicodedata.category(character) in NO_TEXT and character not in "\t\n\v\f\r" for character in text)
    return {ord(character) >> 8 for character in text} if num_odd <= MAX_ODD_SHARE * len(text) else None


def has_stray_zeros(content: bytes) -> bool:
    """Return whether bytes are UTF-8 text except for a few zero bytes."""
    num_zeros = content.count(0)
    if not 0 < num_zeros <= MAX_ZERO_SHARE * len(content) + 1:
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content.replace(b"\0", b""))
    except UnicodeDecodeError:
        return False
    return not any(unicodedata.category(character) == "Cc" and character not in "\t\n\v\f\r" for character in text)
