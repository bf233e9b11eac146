"""Every command of README and docs is real: its flags parse, its make targets exist, its version is the changelog's."""

import json
import os
import re
import shlex
import subprocess
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
import yaml

import install
from tests.campaign.report import BEGIN, END, FINETUNING, OF_COMMANDS, PROMISES
from tests.campaign.stages import STAGES
from tests.fixtures.commands import parse
from tests.fixtures.other_environments import made_environment
from tests.fixtures.script_help import ask_for_help
from train.config.presets import preset_markdown

PROJECT = Path(__file__).parents[2]
PAGES = [
    PROJECT / "README.md",
    PROJECT / "benchmarks" / "speedrun" / "README.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
]
SHELL_BLOCKS = [
    block.replace("\\\n", " ")
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
]
COMMAND_LINES = sorted(
    {" ".join(line.split()) for block in SHELL_BLOCKS for line in block.splitlines() if line and line[0] != "#"}
)
NO_PATH = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NO_MKDOCS_2_WARNING": "1"}
# Pages that the build of the site makes from the code.
GENERATED = re.compile(
    r"docs/(?:design/(?:contributing|changelog|speedrun)|reference/(?:index|presets|recipes|exit_statuses|commands/\w+))\.md"
)
BENCHMARKS = tuple(sorted({word for line in COMMAND_LINES for word in line.split() if word.startswith("benchmarks/")}))

# The public data that commands of the pages read.
PUBLIC_DATA = re.compile(r"(?<![\w/])'?(?:books/|squad/|swag/|blimp\.jsonl|valid\.txt|xquad\.de\.json|work/glue)")

# The commands of Google's CLI that the pages use, with flags of theirs (cloud.google.com/sdk/gcloud/reference).
GCLOUD = {
    "auth login": "",
    "auth application-default login": "",
    "config set": "",
    "services enable": "",
    "storage buckets create": "location uniform-bucket-level-access soft-delete-duration",
    "storage buckets add-iam-policy-binding": "member role",
    "storage cp": "recursive",
    "storage rsync": "recursive",
    "storage rm": "recursive",
    "iam service-accounts create": "",
    "iam service-accounts delete": "quiet",
    "compute tpus tpu-vm create": "zone accelerator-type version service-account spot",
    "compute tpus tpu-vm delete": "zone quiet",
    "compute tpus tpu-vm list": "zone",
    "compute tpus tpu-vm scp": "recurse zone worker",
    "compute tpus tpu-vm ssh": "zone worker command",
    "compute tpus queued-resources create": "node-id zone accelerator-type runtime-version service-account spot",
    "compute tpus queued-resources describe": "zone",
    "compute tpus queued-resources list": "zone",
    "compute tpus queued-resources delete": "zone force",
}
# Programs of every Linux machine, with options of theirs.
PROGRAMS = {
    "cat": "",
    "cp": "-r",
    "curl": "-L -o -O",
    "git": "clone --depth",
    "gzip": "",
    "head": "-q -n",
    "mkdir": "-p",
    "tmux": "new -s",
    "unzip": "-d",
}


def check_gcloud(words):
    """Check that the command is known, and that its flags are among its own."""
    (command,) = (name for name in GCLOUD if words[: len(name.split())] == name.split())
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    assert set(flags) <= set(GCLOUD[command].split())
    if "command" in flags:  # to be executed on the hosts
        folder, *lines = flags["command"].split(" && ")
        assert folder.startswith("cd ")
        for line in lines:
            test_commands_of_the_documentation(line)


def check_program(name, words):
    """Check that the options are known, and that addresses are safe ones."""
    assert {word for word in words if word.startswith("-")} <= set(PROGRAMS[name].split())
    assert all(word.startswith("https://") for word in words if "://" in word)


def check_environment(folder):
    """Check that `install.py` makes an environment of this name."""
    assert folder in {".venv", *map(install.default_environment, install.EXTRAS)}


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_of_the_documentation(line):
    words = shlex.split(line, comments=True)
    if words[0].endswith("/bin/python"):
        check_environment(words[0].removesuffix("/bin/python"))
        words[0] = "python"
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        printed = ask_for_help(BENCHMARKS)[words[1]].printed
        assert "usage: " in printed
        assert all(word in printed for word in words[2:] if word.startswith("--"))
    elif words[0] in ("python", "python3") and words[1] != "-m":
        assert (PROJECT / words[1]).is_file()
        if words[2:] == ["--preset", "list"]:
            with pytest.raises(SystemExit, match="0"):
                parse(words[1], words[2:])
        else:
            assert parse(words[1], words[2:])
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=PROJECT, check=True, capture_output=True)
    elif words[0] == "gcloud":
        check_gcloud(words[1:])
    elif words[0] in PROGRAMS:
        check_program(words[0], words[1:])
    elif words[0] == ".venv-torch/bin/pip" or words[1:] == ["-m", "venv", ".venv-torch"]:
        assert words[-2:] in (["torch", "transformers"], ["venv", ".venv-torch"])
    elif words[0] == "source":
        check_environment(words[1].removesuffix("/bin/activate"))
    elif words[0] == "export":
        assert re.fullmatch(r"[A-Z_]+=\S+", words[1])
    elif words[0] == "tensorboard":
        assert words[1] == "--logdir"
        assert words[2].endswith("/tensorboard")
    else:
        assert words[:3] == ["pip", "install", "-e"]
        extras = re.search(r"\[([\w,]+)\]", words[3])[1].split(",")
        assert set(extras) <= set(metadata("mlm-pretraining").get_all("Provides-Extra") or [])


def test_pages_that_read_public_data_say_where_to_get_it():
    named = set()
    for page in PAGES:
        if page.parent.name == "design" or page.name == "data.md":
            continue
        text = page.read_text(encoding="utf-8")
        read = PUBLIC_DATA.findall("\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S)))
        assert not read or "data.md" in text, f"{page} reads {read[0]}"
        named.update(read)
    data = (PROJECT / "docs/guides/data.md").read_text(encoding="utf-8")
    assert len(named) >= 5
    assert all(name.strip("'/") in data for name in named)


def test_git_ignores_the_folders_of_texts_and_runs():
    """Of the commands of the pages, so that `git add` publishes neither the user's text nor what is made of it."""
    ignored = (PROJECT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"books/", "work/", "runs/"} <= set(ignored)


def test_a_bucket_is_deleted_only_after_its_model_was_copied():
    deleted = []
    for page in PAGES:
        commands = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S))
        for match in re.finditer(r"gcloud storage rm --recursive (\S+)", commands):
            deleted.append(match[1])
            assert f"gcloud storage cp --recursive {match[1]}/model/export ." in commands[: match.start()], page
    assert deleted


def test_the_version_is_the_newest_of_the_changelog():
    newest = re.search(r"^## (\S+)$", (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest[1] == version("mlm-pretraining")


def anchors_of(text):
    """List the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().strip().replace(" ", "-") for heading in headings}


def test_links_of_the_documentation_lead_somewhere():
    """In the repository, where pages of the site that are made from the code are not."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors_of(path.read_text(encoding="utf-8")), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("page", ["README.md", "docs/guides/presets.md"])
def test_the_table_of_presets_is_that_of_the_command(page):
    """README shows some of the rows, the guide all of them."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- presets: begin -->\n(.*?)\n<!-- presets: end -->", text, flags=re.S)
    if page == "README.md":
        assert len(table.splitlines()) >= 7
        assert set(table.splitlines()) <= set(preset_markdown().splitlines())
    else:
        assert table == preset_markdown()


def test_pages_that_the_code_names_exist():
    """In help, errors, and the comments of presets."""
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, encoding="utf-8", check=True)
    for path in listed.stdout.splitlines():
        if path.endswith((".py", ".yaml", ".yml", ".ipynb", "Makefile")):
            text = (PROJECT / path).read_text(encoding="utf-8")
            for name in re.findall(r"(?<![\w/.])docs/[\w/]+\.md", text):
                assert (PROJECT / name).is_file() or GENERATED.fullmatch(name), f"{path}: {name}"


def test_tests_that_the_documentation_names_exist():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    for path, _, test in (name.partition("::") for name in named):
        assert (PROJECT / path).is_file(), path
        assert not test or f"def {test}(" in (PROJECT / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_each_silent_fault_names_a_test_and_says_which_are_slow():
    """That the tests exist is checked above."""
    page = (PROJECT / "docs/design/silent_faults.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| (?!what went|---)", line)]
    assert len(rows) > 20
    for fault, _, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`( \(slow\))?", tests)
        assert len(named) == tests.count("::") > 0, fault
        for path, name, slow in named:
            text = (PROJECT / path).read_text(encoding="utf-8")
            (decorators,) = re.findall(rf"((?:^@.*\n)*)def {name}\(", text, flags=re.M)
            is_slow = "@pytest.mark.slow" in decorators or bool(
                re.search(r"^pytestmark = .*mark\.slow", text, flags=re.M)
            )
            assert bool(slow) == is_slow, f"{path}::{name}"


def test_the_search_of_the_site_finds_a_flag_as_it_is_written():
    """It takes a leading dash for "without this word", so search.js removes the dash; the separator cuts the flag."""
    site = yaml.safe_load((PROJECT / "mkdocs.yml").read_text(encoding="utf-8"))
    (search,) = (plugin["search"] for plugin in site["plugins"] if "search" in plugin)
    assert site.get("extra_javascript") == ["search.js"]
    script = (PROJECT / "docs/search.js").read_text(encoding="utf-8")
    ((dashes, kept),) = re.findall(r'replace\(/(.+)/g, "(.+)"\)', script)
    typed = re.sub(dashes, kept.replace("$", "\\"), "--max-length 8 -m pre-trained")
    assert re.split(search["separator"], typed) == ["max", "length", "8", "m", "pre", "trained"]


@pytest.mark.slow
def test_the_site_builds(tmp_path, tmp_path_factory):
    """Strictly, in an environment with the extra `docs`; no page loads anything from another server."""
    python = made_environment(tmp_path_factory, "docs", f"{PROJECT}[docs]")
    build = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(build, cwd=PROJECT, env=NO_PATH, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    flags = (tmp_path / "site" / "reference" / "commands" / "run_mlm.html").read_text(encoding="utf-8")
    assert "<code>--max-steps</code>" in flags
    assert "search.js" in flags
    assert "roberta-small" in (tmp_path / "site" / "reference" / "recipes.html").read_text(encoding="utf-8")
    # What people search for is a flag as it is written: it must be found by its words.
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert re.split(index["config"]["separator"], "--gradient-checkpointing")[1:] == ["gradient", "checkpointing"]
    assert "137" in (tmp_path / "site" / "reference" / "exit_statuses.html").read_text(encoding="utf-8")
    assert "read_runs" in (tmp_path / "site" / "reference" / "api.html").read_text(encoding="utf-8")
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'(?:src|<link [^>]*?href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert not loaded, page


DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "reliability.md"


def test_every_fault_was_tried_in_every_stage():
    (table,) = re.findall(f"{BEGIN}\n(.*){END}", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    heading, _, *rows = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    assert heading == ["fault", "promised", *(stage.name for stage in STAGES), FINETUNING]
    assert {row[0]: row[1] for row in rows} == PROMISES
    for fault, _, *cells in rows:
        # Fine-tuning trains with the loop of stage 3, which meets the other faults.
        cells = cells if fault in OF_COMMANDS else cells[: len(STAGES)]
        nums_tried = [int(re.match(r"([\d,]+) ", cell)[1].replace(",", "")) for cell in cells]
        assert min(nums_tried) >= (100 if fault == "kill -9" else 1), fault
