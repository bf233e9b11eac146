"""Text files of many encodings: decoded, or refused with the line, the byte, and a way to convert them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.storage.encodings import TextEncodingError, conversion_hint, decode_text

GERMAN = "text,label\nschon,a\nschön und groß,b\nGrüße aus Köln,c\n"
CHINESE = "text,label\n这是一个很好的产品, 质量不错,a\n我不喜欢,b\n"
JAPANESE = "text,label\nこれはとても良い製品です,a\n"
RUSSIAN = "text,label\nЭто очень хороший продукт,a\n"  # noqa: RUF001


@given(
    content=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_marked_text_and_utf8_come_back(content, encoding):
    expected = {"utf-16": "UTF-16", "utf-32": "UTF-32"}.get(encoding, "UTF-8")
    assert decode_text(content.encode(encoding)) == (content, expected)


@pytest.mark.parametrize("codec", ["utf-16", "utf-32"])
def test_either_byte_order_is_read(codec):
    for order in ("le", "be"):
        assert decode_text(f"\ufeff{CHINESE}".encode(f"{codec}-{order}"))[0] == CHINESE


@pytest.mark.parametrize(
    ("content", "line", "byte", "hint"),
    [
        (GERMAN.encode("latin-1"), 3, "0xf6", "WINDOWS-1252"),
        (GERMAN.encode("cp1252").replace(b"\n", b"\r"), 3, "0xf6", "WINDOWS-1252"),
        (GERMAN.encode("cp1252").replace(b"\n", b"\r\n"), 3, "0xf6", "WINDOWS-1252"),
        ("Não há informação sobre ações\n".encode("cp1252"), 1, "0xe3", "WINDOWS-1252"),
        (CHINESE.encode("gb18030"), 2, "0xd5", "GB18030"),
        (JAPANESE.encode("shift_jis"), 2, "0x82", "SHIFT_JIS"),
        (RUSSIAN.encode("cp1251"), 2, "0xdd", "WINDOWS-1251"),
        (GERMAN.encode().replace(b"\xc3\xb6n", b"\xf6n", 1), 3, "0xf6", "Other lines are UTF-8"),
    ],
)
def test_other_encodings_are_refused_with_line_byte_and_the_right_hint(content, line, byte, hint):
    with pytest.raises(TextEncodingError, match=f"^line {line} has the byte {byte}") as caught:
        decode_text(content)
    assert hint in caught.value.hint
    assert "8859" not in caught.value.hint


def test_one_wrong_line_far_into_a_file_is_corrected_rather_than_the_file_converted():
    with pytest.raises(TextEncodingError) as caught:
        decode_text(b"ascii\n" * 200_000 + GERMAN.encode() + b"sch\xf6n\n")
    assert caught.value.hint == "Other lines are UTF-8, so correct this line."
    hint = conversion_hint(b"sch\xf6n", is_line=True)
    assert hint.startswith(
        "Correct this line or, if the whole file is in a different encoding, convert the file: `iconv"
    )


@pytest.mark.parametrize("text", [GERMAN, CHINESE, RUSSIAN])
@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_the_hint_for_unmarked_utf16_names_it(text, encoding):
    with pytest.raises(TextEncodingError) as caught:
        decode_text(text.encode(encoding))
    assert f"iconv -f {encoding} -t UTF-8" in caught.value.hint


WITHOUT_ASCII = [
    "猫は\u3000動物",
    "猫は、\u3000動物です。\n",
    "你好、世界\n",
    "это\u3000и\n",
    "Āāēģ\n",
    "ภาษา\n",
    "한국어\u3000글\n",
]


@pytest.mark.parametrize("order", ["LE", "BE"])
@pytest.mark.parametrize("text", WITHOUT_ASCII)
def test_the_hint_for_utf16_without_ascii_has_the_right_byte_order(text, order):
    """Where characters such as the ideographic space have a zero byte in the other place than ASCII."""
    with pytest.raises(TextEncodingError) as caught:
        decode_text((text * 5).encode(f"UTF-16{order}"))
    assert f"iconv -f UTF-16{order} -t UTF-8" in caught.value.hint


@pytest.mark.parametrize("text", [GERMAN, CHINESE, "a\n"])
@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("num_copies", [1, 20])
def test_a_zero_byte_in_a_text_is_to_be_removed(text, number, num_copies):
    """In one line, or in one of a few throughout a file."""
    lines = text.encode().splitlines(keepends=True)
    index = number % len(lines)
    lines[index] = b"\0" + lines[index]
    other_lines = [] if num_copies == 1 else [b"long enough\n"]
    with pytest.raises(TextEncodingError, match=rf"^line {index + 1} has a zero byte") as caught:
        decode_text(b"".join([*lines, *other_lines] * num_copies))
    assert caught.value.hint == "The rest is text in UTF-8. Remove the zero bytes, for example with `tr -d '\\000'`."


def test_damaged_utf16_and_binary_files_are_said():
    with pytest.raises(TextEncodingError, match="line 5 is not valid UTF-16, which the byte-order mark names"):
        decode_text(GERMAN.encode("utf-16")[:-1] + b"\0\xdc")
    with pytest.raises(TextEncodingError) as caught:
        decode_text(b"\x89PNG\r\n" + bytes(range(256)) * 8)
    assert "binary" in caught.value.hint
