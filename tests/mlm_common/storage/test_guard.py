"""Files that other programs wrote: each exception of a reader becomes one line with file, reason and hint."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError, PermanentError
from mlm_common.storage import check_file, check_folder
from mlm_common.storage.guard import guarded_read


def message_of(path, read, **options):
    with pytest.raises(InputError) as caught, guarded_read(path, "a JSON file", **options):
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a"', "Expecting ':' delimiter: line 1 column 5"),
        (b"", "it is empty. Create or fetch it again."),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer. Fetch"),
        (
            b'{\n"a": "\xfc"}',
            "line 2 has the byte 0xfc, which is not UTF-8. Save it as UTF-8, or convert it: `iconv -f WINDOWS-1252 -t",
        ),
        ("{}".encode("utf-16"), "line 1 has the byte 0xff, which is not UTF-8. Convert it: `iconv -f UTF-16 "),
    ],
)
def test_what_a_file_contains_is_said(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert said in message_of(path, read_json)


def test_a_git_lfs_pointer_is_not_read_as_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    message = message_of(tmp_path / "a.txt", lambda path: path.read_text(encoding="utf-8"), flag="--file")
    assert message.endswith("it is a Git LFS pointer. Fetch the file itself with `git lfs pull`.")


def test_errors_that_explain_themselves_pass(tmp_path):
    for error in (InputError("one"), PermanentError("two"), MemoryError()):
        with pytest.raises(type(error)) as caught, guarded_read(tmp_path, "a file"):
            raise error
        assert caught.value is error


@given(error=st.sampled_from([KeyError, IndexError, TypeError, OSError, ValueError, EOFError]), message=st.text())
def test_any_exception_becomes_one_line(tmp_path, error, message):
    def read(_):
        raise error(message)

    message_of(tmp_path, read)


@pytest.mark.parametrize("check", [check_file, check_folder])
@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_impossible_names_are_one_line(check, name):
    with pytest.raises(InputError, match=r"cannot be read|there is no"):
        check(name, "--file")


def test_a_pipe_is_refused_before_its_reader_waits(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    assert "there is no file" in message_of(tmp_path / "a.json", read_json, flag="--file")
    assert "it is a pipe or device" in message_of(tmp_path / "a.json", read_json)
    with guarded_read(tmp_path, "a folder"):
        pass
