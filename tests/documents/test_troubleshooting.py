"""The page of troubles: its messages are in the code, but for other programs'; its flags are flags of the commands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.commands import COMMANDS, PARSERS

PROJECT = Path(__file__).parents[2]
TEXT = (PROJECT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = "<!-- of another program -->\n"
OUR_MESSAGES = re.findall(
    r"```text\n(.*?)\n```", re.sub(f"{QUOTED}```text\n.*?\n```", "", TEXT, flags=re.S), flags=re.S
)
ELSEWHERE = ("gcloud ", "pip ", "hf ", "sudo ", "--no-deps")  # flags of other programs
DIFFERS = "…"
# What logging's % formats stand for.
PERCENT_FORMAT = re.compile(r"%[.\d]*[sdfg]")


def rendered(node: ast.AST) -> str:
    """Render a string of the code as people see it, with an ellipsis for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(value) for value in node.values)
    if isinstance(node, ast.BinOp):  # texts that are added
        return rendered(node.left) + rendered(node.right)
    return DIFFERS


def strings_of_the_code() -> Iterator[str]:
    for folder in ("mlm_common", "tokenizer_training", "tfrecord_prep", "train"):
        for path in (PROJECT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                    yield PERCENT_FORMAT.sub(DIFFERS, " ".join(rendered(node).split()))


CODE = "\n".join(strings_of_the_code())


@pytest.mark.parametrize("message", OUR_MESSAGES)
def test_our_messages_are_in_the_code(message):
    assert " ".join(message.split()).removesuffix("…").rstrip() in CODE
    assert len(message.replace(DIFFERS, "").strip(" .()")) > 10, "too little to be recognised by"


def test_flags_are_those_of_the_commands():
    known = {name for _, listed, _ in COMMANDS.values() for name in listed.split()}
    known |= {action.dest for module in PARSERS.values() for action in module.build_parser()._actions}
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    flags = [
        flag for span in spans if not span.startswith(ELSEWHERE) for flag in re.findall(r"--([a-z][a-z0-9-]*)", span)
    ]
    assert len(flags) > 30
    assert len(OUR_MESSAGES) > 20
    assert not [flag for flag in flags if flag.replace("-", "_") not in known]
