"""How commands end: their status, and what they say."""

import errno
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from mlm_common.cli import command_line
from mlm_common.cli.command_line import command, parse_arguments
from mlm_common.errors import InputError, PermanentError, RunFailedError
from tests.fixtures.run_command import Outcome, Run

PROJECT_FOLDER = Path(__file__).parents[3]

FULL, HINT = "No space left on device", ". Free some space, then run the command again.\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InputError("--flag must be 1; got 2."), 2, "error: --flag must be 1; got 2.\n"),
        (RunFailedError("stopped at step 3"), 1, "error: stopped at step 3\n"),
        # A file's name may have a line end, and what moves a terminal's cursor.
        (
            InputError("there is no file a\nb\x1b[2Jc\u2028.txt"),
            2,
            "error: there is no file a\\nb\\x1b[2Jc\\u2028.txt\n",
        ),
        (PermanentError("diverged at step 3"), 3, "error: diverged at step 3\n"),
        # As files say it, and as libraries written in Rust do.
        (OSError(errno.ENOSPC, FULL), 1, f"error: [Errno 28] {FULL}{HINT}"),
        (Exception(f"{FULL} (os error 28)"), 1, f"error: {FULL} (os error 28){HINT}"),
        (None, 0, ""),
    ],
)
def test_status_and_message(error: Exception | None, status: int, said: str, run: Run) -> None:
    @command
    def main(argv: object = None) -> None:  # noqa: ARG001
        if error:
            raise error

    assert run(main) == Outcome(status, "", said)


def test_mistakes_of_the_program_keep_their_traceback() -> None:
    @command
    def main(argv: object = None) -> None:  # noqa: ARG001
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main([])


def test_the_commit_has_changes_where_tracked_files_differ(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(tmp_path)]
    (tmp_path / "tracked").touch()
    for words in (["init", "--quiet"], ["add", "tracked"], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(command_line, "PROJECT_FOLDER", tmp_path)
    (tmp_path / "output").touch()
    assert "+" not in command_line.commit()
    (tmp_path / "tracked").write_text("changed", encoding="utf-8")
    assert command_line.commit().endswith("+changes")


@dataclass
class Settings:
    files: list[str] = field(default_factory=list)
    size: int | None = None
    rate: float = 0.5
    name: str = "a"
    unit: Literal["line", "file"] = "line"
    fast: bool = False
    exact: bool | None = None


def settings_of_file(folder: Path, text: str) -> Settings:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    (settings,) = parse_arguments([Settings], ["--config-file", str(path)], "")
    return settings


def test_settings_of_a_file_have_the_types_of_the_flags(tmp_path):
    text = "files: x.txt\nsize: 500\nrate: 1e-4\nname: 2020\nunit: file\nfast: true\nexact: no"
    assert settings_of_file(tmp_path, text) == Settings(["x.txt"], 500, 1e-4, "2020", "file", True, False)
    assert settings_of_file(tmp_path, "files: [x.txt, 1]\nsize:\nrate: 1") == Settings(["x.txt", "1"], None, 1.0)


def test_whole_numbers_may_be_written_with_a_zero():
    (settings,) = parse_arguments([Settings], ["--size", "3.0"], "")
    assert settings.size == 3


@pytest.mark.parametrize("flag", ["--do_train", "--do-eval", "--do_eval=true"])
def test_flags_of_other_scripts_are_refused_in_a_line(flag):
    with pytest.raises(InputError, match=r"^unknown flag --do.(train|eval); leave it out: the command"):
        parse_arguments([Settings], [flag], "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size: 500.5", "--size must be a whole number; received 500.5"),
        ("size: yes", "--size must be a whole number; received True"),
        ("size: [1, 2]", r"--size must be a whole number; received \[1, 2\]"),
        ("rate:", "--rate must be a finite number; received None"),
        ("name: no", "--name must be text; received False"),
        ("files: [[a]]", r"--files must be text; received \['a'\]"),
        ("unit: word", "--unit must be one of line, file; received 'word'"),
        ("fast: 2", "--fast must be true or false; received 2"),
        ("exact: maybe", "--exact must be true or false; received 'maybe'"),
    ],
)
def test_settings_of_a_file_that_no_flag_takes_are_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=rf"settings\.yaml: {message}\."):
        settings_of_file(tmp_path, text)


@pytest.mark.parametrize("value", ["-inf", "nan", "1e999", "much"])
def test_numbers_are_finite(value, tmp_path):
    with pytest.raises(InputError, match=f"^--rate must be a finite number; received {value}"):
        parse_arguments([Settings], [f"--rate={value}"], "")
    with pytest.raises(InputError, match="--rate must be a finite number; received "):
        settings_of_file(tmp_path, f"rate: {value.replace('inf', '.inf').replace('nan', '.nan')}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size: 1\nname: a\nsize: 2", r"must be a YAML or JSON file; .*`size` is given twice .* line 3"),
        ('{"size": 1, "size": 1}', "`size` is given twice"),
        (
            "max-size: 1\nmax_size: 2",
            "must name each flag only once, either with `-` or with `_`; received max-size, max_size",
        ),
        ("name: caf\udce9", "must be a YAML or JSON file; line 1 has the byte 0xe9, which is not UTF-8"),
    ],
)
def test_files_that_yaml_would_take_otherwise_than_they_read(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message):
        parse_arguments([Settings], ["--config-file", str(path)], "")


def test_a_folder_is_no_file_of_settings(tmp_path):
    with pytest.raises(InputError, match=rf"^--config-file: {tmp_path} must be a YAML or JSON file; is a directory\."):
        parse_arguments([Settings], ["--config-file", str(tmp_path)], "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--name", "Gr\udcfc\udcdfe"], r"--name must be text in UTF-8; the byte 0xfc in 'Gr.udcfc.udcdfe' is not\."),
        (["--name", "\ud83d"], r"--name must be text in UTF-8; half a character, U\+D83D, in '.ud83d' is not\."),
    ],
)
def test_text_that_is_not_unicode_is_refused(tmp_path, arguments, reason):
    """As a terminal of another encoding passes it on, or as an escape in a file of flags."""
    with pytest.raises(InputError, match=reason):
        parse_arguments([Settings], arguments, "")
    with pytest.raises(InputError, match="--name must be text in UTF-8"):
        settings_of_file(tmp_path, r'name: "\ud83d"')


@pytest.mark.parametrize("arguments", [["--files", "caf\udce9"], ["--name", "{folder}/caf\udce9"]])
def test_paths_may_have_any_bytes(tmp_path, arguments):
    (tmp_path / "caf\udce9").touch()
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    (settings,) = parse_arguments([Settings], arguments, "")
    assert arguments[1] in (*settings.files, settings.name)
