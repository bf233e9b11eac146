"""Decode text files: UTF-8, or the encoding that a byte-order mark names; say how to convert others."""

import re

# {the first bytes of a text: its encoding}; the longer marks come first, since two of them begin with a shorter one.
BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
UTF8 = "UTF-8"
# Bytes that a hint is derived from.
NUM_BYTES_CHECKED = 1 << 20
_LINE_END = re.compile(rb"\r\n|\r|\n")
_UTF8_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_RUN = re.compile(rb"[\x80-\xff]+")


class TextEncodingError(ValueError):
    """Bytes that are no text of a known encoding: where, and how to convert them."""

    def __init__(self, line: int, problem: str, hint: str) -> None:
        super().__init__(f"line {line:,} {problem}")
        self.line, self.problem, self.hint = line, problem, hint


def encoding_of_mark(start: bytes) -> str | None:
    """Return the encoding that a byte-order mark names, such as `UTF-16`; None without one, or with that of UTF-8."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)


def codec_of(start: bytes) -> str:
    """Return Python's codec for a text that begins with these bytes; it drops the byte-order mark."""
    return (encoding_of_mark(start) or "utf-8-sig").lower()


def decode_text(content: bytes) -> tuple[str, str]:
    """Decode a whole file, and return its text, without a byte-order mark, and the name of its encoding.

    Raises:
        TextEncodingError: it is another encoding than UTF-8, and has no byte-order mark; or it is damaged.
    """
    encoding = encoding_of_mark(content)
    if encoding is None and b"\0" in content:
        line = 1 + len(_LINE_END.findall(content, 0, content.index(0)))
        raise TextEncodingError(line, "has a zero byte, which is no text in UTF-8", conversion_hint(content))
    try:
        return content.decode(codec_of(content)), encoding or UTF8
    except UnicodeDecodeError as error:
        if encoding is not None:
            problem = f"is not {encoding}, as the byte-order mark says ({error.reason})"
            num_lines = error.object.decode(encoding, "replace")[: error.start // 2].count("\n")
            raise TextEncodingError(num_lines + 1, problem, "Make or fetch the file again.") from error
        start = error.start + (len(content) - len(error.object))  # the codec leaves out the mark of UTF-8
        line = 1 + len(_LINE_END.findall(content, 0, start))
        problem = f"has the byte 0x{content[start]:02x}, which is not UTF-8"
        raise TextEncodingError(line, problem, conversion_hint(content)) from error


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which no tokenizer takes."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def conversion_hint(content: bytes) -> str:
    """Say how to convert bytes that are not UTF-8, by the encoding that they look like."""
    marked = encoding_of_mark(content)
    content = content[:NUM_BYTES_CHECKED].removeprefix(b"\xef\xbb\xbf")
    unmarked = marked or _encoding_of_zeros(content)
    if unmarked is not None:
        return f"Convert it: `iconv -f {unmarked} -t UTF-8`."
    if b"\0" in content:
        return "It may be a binary file."
    num_right = len(_UTF8_CHARACTER.findall(content))
    runs = [len(run) for run in _RUN.findall(_UTF8_CHARACTER.sub(b"", content))]
    if num_right > sum(runs):
        return "Other lines are UTF-8: correct this one."
    # Accents of Western Europe are mostly alone among ASCII letters; in other scripts such bytes follow each other.
    if runs and sum(runs) < 1.8 * len(runs):
        return (
            "Save it as UTF-8, or convert it: `iconv -f WINDOWS-1252 -t UTF-8` if it is of Windows in Western Europe."
        )
    return (
        "Save it as UTF-8, or convert it: `iconv -f ENCODING -t UTF-8`, where ENCODING is such as GB18030, "
        "SHIFT_JIS or WINDOWS-1251."
    )


def _encoding_of_zeros(content: bytes) -> str | None:
    """Name the encoding of several bytes per character that text with ASCII characters seems to have."""
    start = content[: 4 * (min(len(content), 4096) // 4)]
    zeros = [4 * start[place::4].count(0) / max(1, len(start)) for place in range(4)]  # shares
    if min(zeros[2:]) > 0.9 > zeros[0]:
        return "UTF-32LE"
    if min(zeros[:2]) > 0.9 > zeros[3]:
        return "UTF-32BE"
    even, odd = zeros[0] + zeros[2], zeros[1] + zeros[3]
    if max(even, odd) < max(0.1, 3 * min(even, odd)):
        return None
    return "UTF-16LE" if odd > even else "UTF-16BE"
