"""CSV of Excel and other writers: the delimiter is recognized or asked for, and errors name the line."""

import csv
import io

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlm_common.corpus.csv_rows import CsvError, CsvRows, parse_delimiter
from mlm_common.errors import InputError


def read(text: str, delimiter: str | None = None) -> tuple[str, list[list[str]]]:
    rows = CsvRows(io.StringIO(text, newline=""), "a.csv", delimiter)
    return rows.delimiter, [rows.names, *(row.fields for row in rows)]


def written(rows: list[list[str]], delimiter: str, line_end: str, quoting: int) -> str:
    lines = []
    for row in rows:
        stream = io.StringIO(newline="")
        csv.writer(stream, delimiter=delimiter, quoting=quoting).writerow(row)  # its \r\n quotes all line ends
        lines.append(stream.getvalue().removesuffix("\r\n") + line_end)
    return "".join(lines)


# Texts and numbers as people write them, with all delimiters, quotation marks and line ends.
FIELDS = st.one_of(
    st.sampled_from(["pos", "neg", "3,5", "1.234,5", "12;30", "a | b", "x\ty", 'say "hi"', "two\nlines", "a\r\nb", ""]),
    st.text('abü ,;|\t"\n\r', max_size=12),
)
NAMES = st.lists(
    st.one_of(
        st.sampled_from(["text", "label", "id", "Text, lang", "Größe (m;n)"]),
        st.text("abc ;,|", min_size=1, max_size=6),
    ),
    min_size=2,
    max_size=4,
    unique=True,
)


@given(
    names=NAMES,
    fields=st.lists(st.lists(FIELDS, min_size=4, max_size=4), min_size=1, max_size=8),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    mark=st.booleans(),
    is_named=st.booleans(),
)
def test_what_csv_writes_comes_back_or_the_delimiter_is_asked_for(
    names, fields, delimiter, line_end, quoting, mark, is_named
):
    rows = [names, *(row[: len(names)] for row in fields)]
    assume(names[0].strip())
    text = (f"sep={delimiter}{line_end}" if mark else "") + written(rows, delimiter, line_end, quoting)
    try:
        read_delimiter, read_rows = read(text, delimiter if is_named else None)
    except InputError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert not mark
        assert not is_named
        assert "--delimiter" in message
        assert len(message.splitlines()) == 1
        return
    with_text = [row for row in rows[1:] if any(field.strip() for field in row)]
    assert (read_delimiter, read_rows) == (delimiter, [names, *with_text])


@pytest.mark.parametrize(
    ("text", "delimiter", "rows"),
    [
        ("text,label\nfine; really; good,pos\nso; so,neg\n", ",", [["fine; really; good", "pos"], ["so; so", "neg"]]),
        ("text,label\na;b,pos\n", ",", [["a;b", "pos"]]),
        ("Text;Wert\nGut, sehr gut;3,5\n", ";", [["Gut, sehr gut", "3,5"]]),
        ('"Text";"Wert"\n"a, b";"1"\n', ";", [["a, b", "1"]]),
        ('"a;b","c"\n"d;e","f"\n', ",", [["d;e", "f"]]),
        ("text, lang;label\nx;y\nz;w\n", ";", [["x", "y"], ["z", "w"]]),
        ("text\nHello\n", ",", [["Hello"]]),
        ("text\tlabel\na, b\tx\n \n", "\t", [["a, b", "x"]]),
        ("text|label\na\\, b|x\n", "|", [["a\\, b", "x"]]),
        ("sep=|\r\na,b\r\nc,d\r\n", "|", [["c,d"]]),
        ('text;note,label\na;b,x\nc,"d"\ne,f\n', ",", [["a;b", "x"], ["c", "d"], ["e", "f"]]),
    ],
)
def test_texts_do_not_mislead(text, delimiter, rows):
    read_delimiter, read_rows = read(text)
    assert (read_delimiter, read_rows[1:]) == (delimiter, rows)


def test_two_readings_are_asked_about_with_the_line():
    with pytest.raises(
        InputError, match=r"a.csv may have commas or semicolons between its columns; line 2 is `id,a;b`"
    ):
        read("\nid,a;b\n1,c;d\n2,e;f\n")
    assert read("id,a;b\n1,c;d\n", ";")[1] == [["id,a", "b"], ["1,c", "d"]]


def test_one_damaged_row_among_many_does_not_change_the_delimiter():
    lines = ["a,b;c", *["x,y"] * 80, 'z,"a" b', *["x,y"] * 20]
    rows = CsvRows(io.StringIO("\n".join(lines)), "a.csv")
    assert rows.delimiter == ","
    with pytest.raises(CsvError, match=r"row that starts in line 82 .*`z,\"a\" b`"):
        list(rows)


@pytest.mark.parametrize("num_rows", [5, 5000])
def test_a_quotation_mark_out_of_place_is_named_with_its_line(num_rows):
    text = "text,label\n" + '"two\nlines",x\n' * num_rows + '"never closed,x\n' + "a,b\n" * 3
    with pytest.raises(CsvError, match=f"line {2 * num_rows + 2:,} has a misplaced quotation mark .*never closed"):
        read(text)


def test_a_row_of_another_length_is_named_with_its_line_and_start():
    rows = CsvRows(io.StringIO('sep=;\na;b\n"x\ny";1\n' + "long " * 40 + "\n"), "a.csv")
    assert [rows.problem(row) for row in rows][:1] == [None]
    rows = CsvRows(io.StringIO("a;b\n1;2\n" + "long " * 40 + ";;x\n"), "a.csv")
    problems = [rows.problem(row) for row in rows]
    assert problems == [None, f"line 3 has 3: `{('long ' * 40)[:80]} …`"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a;b\n1;2\n;\n; \n3;4\n;;;\n", [["1", "2"], ["3", "4"]]),
        ("a,b\n1,2,\n3,4,,\n,5\n", [["1", "2"], ["3", "4"], ["", "5"]]),
        ("a,b,\n1,2\n3,4,\n5,6,7\n", [["1", "2", ""], ["3", "4", ""], ["5", "6", "7"]]),
    ],
)
def test_blank_rows_and_fields_that_a_spreadsheet_adds_are_no_data(text, expected):
    rows = CsvRows(io.StringIO(text), "a.csv")
    assert [(row.fields, rows.problem(row)) for row in rows] == [(fields, None) for fields in expected]


@pytest.mark.parametrize("title", ["Reviews, 2024", "Reviews; 2024", "a,b,c,d", "\nReviews\tand, more"])
@pytest.mark.parametrize(("delimiter", "text"), [(",", "a b; c"), (";", "a, b"), ("\t", "a, b; c")])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_title_that_holds_a_delimiter_is_said(title, delimiter, text, is_named):
    """It has other fields than the rows below it."""
    rows = [["text", "label", "date"], [text, "x", "1"], ["d", "y", "2"]]
    table = written(rows, delimiter, "\n", csv.QUOTE_MINIMAL)
    csv_rows = CsvRows(io.StringIO(f"{title}\n{table}"), "a.csv", delimiter if is_named else None)
    assert csv_rows.problem(next(iter(csv_rows))) is not None
    assert csv_rows.hint == "The first row must name the columns: delete a title above it."


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_quotation_marks_around_whole_rows_are_said(delimiter):
    rows = [["text", "label"], [f'say "hi"{delimiter} Ann', "x"], ["b", "y"]]
    inner = [written([row], delimiter, "", csv.QUOTE_MINIMAL) for row in rows]
    text = written([[line] for line in inner], ",", "\r\n", csv.QUOTE_ALL)
    with pytest.raises(InputError, match=r"a\.csv has quotation marks around whole rows, such as `\"text.*label\"`"):
        read(text)
    assert read(text, "|") == ("|", [[line] for line in inner])
    assert read('"text"\n"Hello, you"\n') == (",", [["text"], ["Hello, you"]])


def test_rows_are_read_as_they_come():
    taken = []

    def lines():
        for number in range(100_000):
            taken.append(number)
            yield "a;b\n"

    rows = CsvRows(lines(), "a.csv")
    next(iter(rows))
    assert len(taken) <= 1001


def test_a_delimiter_is_a_character():
    assert [parse_delimiter(text) for text in (None, ";", "tab", "\\t", "|")] == [None, ";", "\t", "\t", "|"]
    for wrong in ("", "ab", '"', "a", "\n"):
        with pytest.raises(InputError, match="--delimiter must be one character"):
            parse_delimiter(wrong)


@pytest.mark.parametrize(
    ("text", "num_blank", "first_blank"),
    [
        ("a,b\n1,2\n,\n\n ,\n3,4\n", 2, 3),
        ("a,b\n1,2\n,\n,\n", 0, 0),
        ("a,b\n,\n1,2\n,\n3,4\n,\n", 2, 2),
        ("a\n1\n\n2\n", 0, 0),
    ],
)
def test_blank_rows_between_others_are_counted(text, num_blank, first_blank):
    rows = CsvRows(io.StringIO(text, newline=""), "rows.csv")
    assert all(any(row.fields) for row in rows)
    assert (rows.num_blank, rows.first_blank) == (num_blank, first_blank)
