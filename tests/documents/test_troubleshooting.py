"""The page of troubles: its messages are in the code, but for other programs'; its flags are flags of the commands."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures.commands import COMMANDS, PARSERS
from tests.fixtures.doctor_cases import config_of
from train.checks import platforms
from train.config.hardware import HardwareConfig
from train.loop import report
from train.runtime.runtime_choice import Installed, choose_runtime

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


ON_A_TPU = (PROJECT / "docs" / "tpu" / "start.md").read_text(encoding="utf-8")


def test_what_a_user_of_a_tpu_sees_is_in_the_code():
    failures = ON_A_TPU.partition("## When it fails")[2].partition("\n## ")[0]
    seen = [span for row in re.findall(r"^\| (.+?) \|", failures, flags=re.M) for span in re.findall(r"`(.+?)`", row)]
    assert len(seen) > 5
    assert not [message for message in seen if message not in CODE]


def test_a_user_of_a_tpu_sees_the_runtime_in_these_lines(monkeypatch):
    monkeypatch.setattr(report, "version", lambda _: "0.7.2")
    hardware, reason = choose_runtime(HardwareConfig(tpu_name="local"), lambda _: Installed("TPU", False, True, True))
    opened: Any = SimpleNamespace(config=SimpleNamespace(hardware=hardware), why_runtime=reason)
    monkeypatch.setattr(platforms, "ask_tensorflow", lambda *_: {"runtime": hardware.runtime, "reason": reason})
    lines = [f"{name:<22} {text}" for name, text in report.describe_runtime(opened).items()]
    config = replace(config_of(), hardware=hardware)
    lines += [str(finding) for finding in platforms.check_runtime(config)]
    assert len(lines) == 2
    assert all(f"\n{line}\n" in ON_A_TPU for line in lines), lines


def test_flags_are_those_of_the_commands():
    flag_names = {name for _, listed, _ in COMMANDS.values() for name in listed.split()}
    flag_names |= {action.dest for module in PARSERS.values() for action in module.build_parser()._actions}
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    flags = [
        flag for span in spans if not span.startswith(ELSEWHERE) for flag in re.findall(r"--([a-z][a-z0-9-]*)", span)
    ]
    assert len(flags) > 30
    assert len(OUR_MESSAGES) > 20
    assert not [flag for flag in flags if flag.replace("-", "_") not in flag_names]
