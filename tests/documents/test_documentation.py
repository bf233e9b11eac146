"""Every command of README and docs is real: its flags parse, its make targets exist, its version is the changelog's."""

import re
import shlex
import subprocess
from importlib.metadata import metadata, version
from pathlib import Path

import pytest

import install
from tests.fixtures.commands import parse
from tests.fixtures.script_help import ask_for_help

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
SHELL_BLOCKS = [
    block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
]
COMMAND_LINES = [line for block in SHELL_BLOCKS for line in block.splitlines() if line and not line.startswith("#")]
BENCHMARKS = tuple(sorted({word for line in COMMAND_LINES for word in line.split() if word.startswith("benchmarks/")}))

# The commands of Google's CLI that the pages use, with flags of theirs (cloud.google.com/sdk/gcloud/reference).
GCLOUD = {
    "config set": "",
    "services enable": "",
    "storage buckets create": "location uniform-bucket-level-access soft-delete-duration",
    "storage buckets add-iam-policy-binding": "member role",
    "storage cp": "recursive",
    "storage rm": "recursive",
    "iam service-accounts create": "",
    "iam service-accounts delete": "quiet",
    "compute tpus tpu-vm create": "zone accelerator-type version service-account spot",
    "compute tpus tpu-vm delete": "zone quiet",
    "compute tpus tpu-vm list": "zone",
    "compute tpus tpu-vm ssh": "zone worker command",
    "compute tpus queued-resources create": "node-id zone accelerator-type runtime-version service-account spot",
    "compute tpus queued-resources describe": "zone",
    "compute tpus queued-resources delete": "zone force",
}


def check_gcloud(words):
    """Check that the command is known, and that its flags are among its own."""
    (command,) = (name for name in GCLOUD if words[: len(name.split())] == name.split())
    flags = [word for word in words if word.startswith("--")]
    assert {flag.removeprefix("--").partition("=")[0] for flag in flags} <= set(GCLOUD[command].split())


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_of_the_documentation(line):
    words = shlex.split(line, comments=True)
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        printed, _ = ask_for_help(BENCHMARKS)[words[1]]
        assert "usage: " in printed
        assert all(word in printed for word in words[2:] if word.startswith("--"))
    elif words[0] in ("python", "python3"):
        assert (PROJECT / words[1]).is_file()
        assert parse(words[1], words[2:])
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=PROJECT, check=True, capture_output=True)
    elif words[0] == "gcloud":
        check_gcloud(words[1:])
    elif words[0] == "source":
        assert words[1:] in [[f"{install.default_environment(extra)}/bin/activate"] for extra in install.EXTRAS]
    elif words[0] == "export":
        assert re.fullmatch(r"[A-Z_]+=\S+", words[1])
    else:
        assert words[:3] == ["pip", "install", "-e"]
        extras = re.search(r"\[([\w,]+)\]", words[3])[1].split(",")
        assert set(extras) <= set(metadata("mlm-pretraining").get_all("Provides-Extra") or [])


def test_the_version_is_the_newest_of_the_changelog():
    newest = re.search(r"^## (\S+)", (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest[1] == version("mlm-pretraining")


def test_links_of_the_documentation_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_tests_that_the_documentation_names_exist():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    for path, _, test in (name.partition("::") for name in named):
        assert not test or f"def {test}(" in (PROJECT / path).read_text(encoding="utf-8"), f"{path}::{test}"
        assert (PROJECT / path).is_file(), path


@pytest.mark.slow
def test_the_quick_start(tmp_path):
    """All of `make quickstart`, with few steps, in the environment the tests run in."""
    settings = [f"QUICKSTART_DIR={tmp_path}", "QUICKSTART_STEPS=4"]
    done = subprocess.run(["make", "quickstart", *settings], cwd=PROJECT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model" / "export" / "model.safetensors").exists()
    assert "frequency baseline" in done.stdout
    assert done.stdout.count("[MASK]") == 3
    # Two processes have read the same text, about as much as is wanted at most.
    texts = re.findall(r"Built-in corpus: ([\d,]+ documents), ([\d.]+) MB", done.stderr)
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert 10 < float(texts[0][1]) <= 25
