"""Decode text files: UTF-8, or the encoding that a byte-order mark names; say how to convert others."""

import codecs
import re
import unicodedata

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
# Categories of code points that texts have hardly any of, and the share of them in bytes that are taken for text.
NO_TEXT, MAX_ODD_SHARE = ("Cc", "Cn", "Co", "Cs"), 0.01
# UTF-16 has more zero bytes, or control characters beside them.
MAX_ZERO_SHARE = 0.1
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
    if marked is None and has_stray_zeros(content):
        return "The rest is text in UTF-8: remove the zero bytes, as `tr -d '\\000'` does."
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
    """Name the encoding of several bytes per character that text with zero bytes seems to have.

    Of UTF-16's two byte orders the right one makes characters of fewer blocks, as those of a script are neighbors.
    """
    start = content[: 4 * (min(len(content), 4096) // 4)]
    if b"\0" not in start:
        return None
    blocks = {one: _blocks_of_text(start, one) for one in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")}
    readable = {name: found for name, found in blocks.items() if found is not None}
    return min(readable, key=lambda name: len(readable[name]), default=None)


def _blocks_of_text(content: bytes, encoding: str) -> set[int] | None:
    """Decode bytes, whose last character may be cut off, and return the blocks of characters; None if it is no text."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(content)
    except UnicodeDecodeError:
        return None
    num_odd = sum(unicodedata.category(one) in NO_TEXT and one not in "\t\n\v\f\r" for one in text)
    return {ord(one) >> 8 for one in text} if num_odd <= MAX_ODD_SHARE * len(text) else None


def has_stray_zeros(content: bytes) -> bool:
    """Return whether bytes are UTF-8 text but for a few zero bytes."""
    num_zeros = content.count(0)
    if not 0 < num_zeros <= MAX_ZERO_SHARE * len(content) + 1:
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content.replace(b"\0", b""))
    except UnicodeDecodeError:
        return False
    return not any(unicodedata.category(one) == "Cc" and one not in "\t\n\v\f\r" for one in text)
