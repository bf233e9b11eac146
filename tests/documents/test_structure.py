"""The folders: names that shadow nothing, and the map of them in CONTRIBUTING.md. The code: encodings and variables."""

import ast
import importlib
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import pytest

PROJECT = Path(__file__).parents[2]
STAGES = ("tokenizer_training", "tfrecord_prep", "train", "finetuning")
# Of tests/ the map names what is not there once more.
MAPPED = ("mlm_common", *STAGES, "benchmarks", "recipes", "notebooks", "docs")
VAGUE_NAMES = {"one", "ones", "its", "there", "more", "found", "known", "rest"}


def tracked_files() -> list[PurePosixPath]:
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, encoding="utf-8", check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return [PurePosixPath(line) for line in listed.stdout.splitlines()]


def test_modules_shadow_nothing():
    """A script's folder comes first on the path: no module in it may bear the name of one that others import."""
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    for folder in STAGES:
        names = {path.stem for path in (PROJECT / folder).iterdir()} - {"__init__", "__pycache__"}
        assert not names & taken, folder


def test_the_map_of_the_code_names_all_folders():
    page = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^mlm_common/.*?(?=^```)", page, flags=re.M | re.S)
    folders: list[str] = []
    for branch, name in re.findall(r"^([│├└─ ]*)([\w.]+)/ +\S", tree, flags=re.M):
        parents = folders[-1].split("/")[: len(branch) // 4] if folders else []
        folders.append("/".join([*parents, name]))
    assert len(folders) == len(tree.splitlines())
    tracked = {str(parent) for path in tracked_files() for parent in path.parents}
    assert set(folders) <= tracked
    mapped = {folder for folder in tracked if folder.split("/")[0] in MAPPED and not folder.startswith("train/checks/")}
    assert mapped == {folder for folder in folders if folder.split("/")[0] != "tests"}


def names_no_encoding(call: ast.Call) -> bool:
    keywords = {keyword.arg for keyword in call.keywords}
    values = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    text = {
        "read_text": not call.args,
        "write_text": len(call.args) == 1,
        "open": any(value in ("r", "w", "a", "x", "rt", "wt", "at", "xt") for value in values),
    }
    return "encoding" not in keywords and ("text" in keywords or text.get(getattr(call.func, "attr", ""), False))


def test_text_is_read_and_written_in_a_named_encoding():
    """Otherwise a program depends on its locale."""
    unnamed = [
        f"{path}:{node.lineno}"
        for path in tracked_files()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse((PROJECT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and names_no_encoding(node)
    ]
    assert not unnamed


def vague_names(code: str) -> list[str]:
    """List `line: name` of the variables, arguments, attributes, functions and classes with a vague name."""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Store):
            continue
        field = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}.get(type(node), "name")
        if (getattr(node, field, None) or "").strip("_") in VAGUE_NAMES:
            names.append(f"{node.lineno}: {getattr(node, field)}")
    return names


def test_variables_say_what_they_hold():
    """Such as `row`, `match` or `extra_flags`."""
    code = "for one in more:\n    self.known = lambda _rest: print(one.found)\ndef there(): pass"
    assert sorted(vague_names(code)) == ["1: one", "2: _rest", "2: known", "3: there"]
    vague = [
        f"{path}:{name}"
        for path in tracked_files()
        if path.suffix == ".py"
        for name in vague_names((PROJECT / path).read_text(encoding="utf-8"))
    ]
    assert not vague


@pytest.mark.parametrize("stage", ["train", "finetuning"])
def test_the_chapters_of_a_stage_are_all_there(stage):
    named = set(re.findall(r"\b(\w+(?:\.py|/))", importlib.import_module(stage).__doc__ or ""))
    chapters = {
        path.parts[1] + ("/" if len(path.parts) > 2 else "") for path in tracked_files() if path.parts[0] == stage
    }
    assert named == chapters - {"__init__.py"}
