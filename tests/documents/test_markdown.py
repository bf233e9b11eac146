"""Markdown that GitHub and the site show alike, and commands that a narrow window shows whole."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# What Material for MkDocs or pymdownx render, and GitHub prints as it is.
ONLY_ON_THE_SITE = {
    "an admonition": r"^ *(?:!!!|\?\?\?\+?) ",
    "a snippet": r"--8<--",
    "a tab": r'^ *===[+!]? "',
    "attributes": r"\{:? *[.#][\w-]",
    "an icon": r"(?<![\w`]):(?:material|fontawesome|octicons|simple)-",
}
# Languages that GitHub colours; a fence with another word has plain text, which says `text`.
LANGUAGES = {"", "bash", "console", "dockerfile", "ini", "json", "python", "text", "yaml"}
MOST_COLUMNS = 88
EMBEDDED = re.compile(r"<!-- ([\w/]+\.py): begin -->\n```python\n(.*?)```\n<!-- \1: end -->", flags=re.S)


def markdown_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=PROJECT, capture_output=True, encoding="utf-8")
    return sorted(path for path in listed.stdout.split("\0") if path)


def read(page: str) -> str:
    return (PROJECT / page).read_text(encoding="utf-8")


def prose_and_blocks(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a page into its prose and its fenced blocks, each with the words after its fence."""
    fence = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", flags=re.M)
    prose = re.sub(r"`[^`\n]+`", "", fence.sub("", text))
    return prose, [(info.strip(), block) for info, block in fence.findall(text)]


@pytest.mark.parametrize("page", markdown_files())
def test_a_page_has_nothing_that_github_does_not_render(page):
    prose, blocks = prose_and_blocks(read(page))
    for name, pattern in ONLY_ON_THE_SITE.items():
        match = re.search(pattern, prose, flags=re.M)
        assert not match, f"{page} has {name}: {match[0]!r}"
    assert {info for info, _ in blocks} <= LANGUAGES


@pytest.mark.parametrize("page", markdown_files())
def test_commands_are_wrapped(page):
    """Only a line of one word, which cannot be cut, may be longer."""
    for info, block in prose_and_blocks(read(page))[1]:
        if info in ("bash", "console"):
            for line in (line for line in block.splitlines() if len(line) > MOST_COLUMNS):
                words = line.split() if line.startswith("#") else shlex.split(line.removesuffix("\\"), comments=True)
                assert len(words) == 1, f"{page}: {line}"


@pytest.mark.parametrize("page", ["docs/tutorials/custom_task.md"])
def test_programs_on_a_page_are_those_of_their_files(page):
    programs = EMBEDDED.findall(read(page))
    assert programs
    assert dict(programs) == {path: read(path) for path, _ in programs}
