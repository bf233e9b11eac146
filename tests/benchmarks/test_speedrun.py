"""The speedrun: text, entrants and budget are checked, one line says what is wrong, and results are kept."""

import contextlib
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring.generated_text import write_generated_text
from benchmarks.speedrun import in_turns, prepare, race, text
from benchmarks.speedrun.entrants import Entrant, Measured, read_entrants, run_limited
from mlm_common.errors import InputError
from tests.fixtures.results import read_json, write_jsonl
from train.config.settings import parse_training_config

TABLE = Path(race.__file__).with_name("entrants.yaml")
WORDS = "these fourteen plain words are found in both of the texts without any change"
REFUSED = {
    "a list": b"- a\n- b\n",
    "nothing": b"",
    "not YAML": b"a: [",
    "not UTF-8": b"a: \xff",
    "no command": b"a: {about: x}",
    "another key": b"a: {about: x, command: y, budget: 3}",
    "a number": b"a: {about: x, command: 3}",
    "a name that is none": b"3: {about: x, command: y}",
    "an unknown placeholder": b"a: {about: x, command: 'y {minutes}'}",
    "a placeholder without a name": b"a: {about: x, command: 'y {}'}",
    "an attribute": b"a: {about: x, command: 'y {seed.real}'}",
    "an open brace": b"a: {about: x, command: 'y {seed'}",
    "an open quote": b'a: {about: x, command: "y \'z"}',
    "a path as a name": b"../a: {about: x, command: y}",
    "no program": b"a: {about: x, command: '  '}",
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=list(REFUSED))
def test_a_table_of_entrants_that_is_none_gets_one_line(content, tmp_path):
    path = tmp_path / "entrants.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"^--entrants-file: [^\n]*entrants\.yaml[^\n]*$"):
        read_entrants(path)


def test_the_table_of_records_is_that_of_the_runs():
    runs = [json.loads(line) for line in TABLE.with_name("records.jsonl").read_text(encoding="utf-8").splitlines()]
    page = TABLE.with_name("README.md").read_text(encoding="utf-8").replace("**", "")
    assert {run["entrant"] for run in runs} <= set(read_entrants(TABLE))
    for name in {run["entrant"] for run in runs}:
        of_entrant = [run for run in runs if (run["entrant"], run["budget"]) == (name, 120)]
        scores = [run["bits_per_byte"] for run in of_entrant if "killed" not in run]
        shown = ["killed after 120 seconds" if "killed" in run else f"{run['bits_per_byte']:.3f}" for run in of_entrant]
        assert f"| {statistics.mean(scores):.3f} | {', '.join(shown)} | `{name}` |" in page


@pytest.mark.parametrize(("commit", "compared"), [("7e989e8e", "ours-bfloat16"), ("f709fd80", "quick-start")])
def test_the_tables_of_turns_are_those_of_the_runs(commit, compared):
    file = TABLE.with_name("records_in_turns.jsonl")
    runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    page = TABLE.with_name("README.md").read_text(encoding="utf-8")
    by_entrant: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run["commit"] == commit:
            by_entrant.setdefault(run["entrant"], []).append(run)
    first = by_entrant[compared]
    for name, of_entrant in by_entrant.items():
        bits = [run["bits_per_byte"] for run in of_entrant]
        mean_seconds = statistics.mean(run["seconds"] for run in of_entrant)
        ratios = [first_run["seconds"] / run["seconds"] for first_run, run in zip(first, of_entrant, strict=True)]
        shown = f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if of_entrant != first else "1"
        scores = f"{statistics.mean(bits):.3f} ({min(bits):.3f}-{max(bits):.3f})"
        assert f"| `{name}` | 350 | {scores} | {mean_seconds:.0f} | {shown} |" in page


def test_entrants_of_ours_have_flags_that_exist(tmp_path):
    entrants = read_entrants(TABLE)
    assert {"quick-start", "torch-adamw", "torch-muon"} <= set(entrants)
    values = {"python": "py", "torch_python": "", "seed": 1, "seconds": 9, "steps": 7}
    for entrant in entrants.values():
        arguments = entrant.arguments({**values, "data": tmp_path, "output": tmp_path / "two words"})
        assert str(tmp_path / "two words") in arguments
        if arguments[1] == "train/run_mlm.py":
            config = parse_training_config(arguments[2:], "")
            assert (config.optimization.max_steps, config.run.seed) == (7, 1)


def test_the_splits_are_different_packages():
    names = [name.split("-")[0] for packages in text.PACKAGES.values() for name in packages]
    assert len(set(names)) == len(names)
    assert all(name.endswith("-py3-none-any.whl") for packages in text.PACKAGES.values() for name in packages)


def write_wheel(path, **modules):
    with zipfile.ZipFile(path, "w") as archive:
        for name, docstring in modules.items():
            archive.writestr(f"{name}/__init__.py", f'"""{docstring}"""\n')
        archive.writestr("data.txt", "Not a module. " * 20)


def test_the_text_is_the_docstrings_of_wheels_and_shares_no_long_run_of_words(tmp_path, monkeypatch):
    docstring = "{} is a module about a subject of which nobody else writes a single line, whatever it is called. " * 2
    write_wheel(tmp_path / "one-1-py3-none-any.whl", a=docstring.format("One", "It"), b=f"Read first. {WORDS}. " * 2)
    write_wheel(tmp_path / "two-1-py3-none-any.whl", c=f"Then, in other words: {WORDS}. " * 2, d="Different here. " * 9)
    write_wheel(tmp_path / "three-1-py3-none-any.whl", e="Something else again. " * 9)
    packages = dict(zip(text.SPLITS, ("one", "two", "three"), strict=True))
    monkeypatch.setattr(
        text, "PACKAGES", {split: {f"{name}-1-py3-none-any.whl": ""} for split, name in packages.items()}
    )
    text.write_text(tmp_path, tmp_path)
    written = {
        split: [
            json.loads(line)["text"] for line in (tmp_path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for split in text.SPLITS
    }
    assert [len(documents) for documents in written.values()] == [2, 1, 1]
    assert written["validation"][0].startswith("Different")
    assert not any("Not a module" in document for documents in written.values() for document in documents)


@pytest.fixture
def data(tmp_path):
    """A folder with the tokenizer and a text, which is all that a race itself reads."""
    folder = tmp_path / "data"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "text").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": [["a", -1.0]]}}), encoding="utf-8"
    )
    return folder


def program(vocab=("a",), *, config=True):
    """A command that exports a model with this vocabulary."""
    tokenizer = json.dumps({"model": {"vocab": [[token, -1.0] for token in vocab]}})
    lines = [
        "import pathlib, sys",
        "folder = pathlib.Path(sys.argv[1], 'export')",
        "folder.mkdir(parents=True)",
        f"(folder / 'tokenizer.json').write_text({tokenizer!r})",
        "(folder / 'config.json').write_text('{}')" if config else "",
    ]
    return "\n".join(lines)


ENTRANTS = {
    "good": (program(), ""),
    "other-tokenizer": (program(("a", "b")), r"wrote a model with another tokenizer; \S+ must be that of \S+"),
    "no-export": (program(config=False), r"wrote no model; \S+/export/config\.json does not exist"),
    "no-json": (
        program().replace(".write_text('{\"", ".write_text('{<"),
        r"\S+tokenizer\.json must be a tokenizer; .*",
    ),
    "failing": ("raise SystemExit(7)", r"ended with status 7; its output is in \S+log\.txt"),
}


@pytest.mark.parametrize("name", ENTRANTS)
def test_an_entrant_that_breaks_a_rule_gets_one_line_and_no_result(name, data, tmp_path, monkeypatch, capsys):
    code, expected = ENTRANTS[name]
    (tmp_path / "entrant.py").write_text(code, encoding="utf-8")
    write_entrants(tmp_path, f"{{python}} {tmp_path}/entrant.py {{output}}")
    monkeypatch.setattr(race, "score", lambda *_: {"value": 1.25, "standard_error": 0.01})
    status = run_race(data, tmp_path, "--seconds", "600")
    printed = capsys.readouterr()
    assert status == bool(expected)
    assert re.fullmatch(rf"error: one, seed 4: {expected}\.[^\n]*\n" if expected else "", printed.err), printed.err
    assert bool(re.search(r"^one +1\.250 +\(1\.250-1\.250\) +1 ", printed.out, re.MULTILINE)) == (not expected)


def write_entrants(folder, command):
    (folder / "entrants.yaml").write_text(json.dumps({"one": {"about": "", "command": command}}), encoding="utf-8")


def run_race(data, folder, *flags):
    table = ("--entrants-file", str(folder / "entrants.yaml"), "--seeds", "4", "--any-data")
    with pytest.raises(SystemExit) as ended:
        race.main([str(data), str(folder / "runs"), *table, *flags])
    return ended.value.code


def test_an_entrant_over_its_budget_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    """The budget ends when the child has been started; the test waits until the child has ended."""
    real_wait = subprocess.Popen.wait

    def wait(process, timeout=None):
        if timeout is None:
            return real_wait(process)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    command = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; wait"]
    with pytest.raises(InputError, match=r"^took more than its 120 s, and was killed; its output is in \S+\.$"):
        run_limited(command, tmp_path / "log.txt", 120)
    state = Path(f"/proc/{(tmp_path / 'pid').read_text(encoding='utf-8').strip()}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while state.read_text(encoding="utf-8").split()[2] != "Z":
            time.sleep(0.01)


def test_a_race_continues_where_it_stopped(data, tmp_path, monkeypatch, capsys):
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'count')!r}).open('a').write('x')\n{program()}"
    (tmp_path / "entrant.py").write_text(code, encoding="utf-8")
    write_entrants(tmp_path, f"{{python}} {tmp_path}/entrant.py {{output}}")
    monkeypatch.setattr(race, "score", lambda *_: {"value": 1.25, "standard_error": None})
    assert [run_race(data, tmp_path), run_race(data, tmp_path, "--seeds", "4", "5")] == [0, 0]
    assert (tmp_path / "count").read_text(encoding="utf-8") == "xx"
    assert re.search(r"^one +1\.250 .* 2 ", capsys.readouterr().out, re.MULTILINE)
    table = str(tmp_path / "entrants.yaml")
    (result,) = tmp_path.glob("runs/one/*/seed-5/result.json")
    result.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^error: \S+seed-5/result\.json must be a result [^\n]* Delete it[^\n]*$"):
        race.main([str(data), str(tmp_path / "runs"), "--any-data", "--seeds", "4", "--entrants-file", table])


def test_steps_are_planned_from_two_runs_that_find_all_files_read(data, tmp_path, monkeypatch):
    lengths = []

    def run(command, _log, _seconds):
        lengths.append(int(command[1]))
        return Measured(10 + 0.125 * lengths[-1] + 7 * (len(lengths) == 1), 0.0)

    monkeypatch.setattr(race, "run_limited", run)
    entrant = Entrant("one", "", "program {steps}")
    contest = race.Race(data, tmp_path / "runs", "", 120, 0)
    assert [contest.plan(entrant), contest.plan(entrant)] == [832, 832]
    assert lengths == [20, 20, 120]
    with pytest.raises(InputError, match=r"^has no time for a step in 5 s: its start and end take 10 s\.$"):
        race.Race(data, tmp_path / "runs", "", 5, 0).plan(entrant)
    assert race.Race(data, tmp_path / "runs", "", 5, 0).plan(Entrant("two", "", "program")) == 0


LOGGING = """
import sys, time
for _ in range(40):
    open(sys.argv[1], "a").write(sys.argv[2])
    time.sleep(0.005)
sys.exit(int(sys.argv[3]))
"""


def test_in_turns_only_one_program_runs_at_a_time(tmp_path):
    commands = [[sys.executable, "-c", LOGGING, str(tmp_path / "order"), name, "0"] for name in "ab"]
    turns = in_turns.run_in_turns(commands, [tmp_path / "a.txt", tmp_path / "b.txt"], 0.05)
    order = (tmp_path / "order").read_text(encoding="utf-8")
    num_changes = sum(previous != current for previous, current in itertools.pairwise(order))
    assert (order.count("a"), order.count("b")) == (40, 40)
    assert 1 <= num_changes < sum(map(len, turns))
    assert all(seconds > 0 for of_program in turns for seconds in of_program)


def test_in_turns_a_program_that_fails_ends_the_others(tmp_path):
    """The other would never end."""
    commands = [[sys.executable, "-c", LOGGING, str(tmp_path / "order"), "a", "7"], ["sleep", "100000"]]
    with pytest.raises(InputError, match=r"^a program ended with status 7; its output is in \S+a\.txt\.$"):
        in_turns.run_in_turns(commands, [tmp_path / "a.txt", tmp_path / "b.txt"], 0.05)


def test_in_turns_results_are_kept_and_compared_with_the_first(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "entrant.py").write_text(program(), encoding="utf-8")
    by_steps, by_seconds = (
        f"{{python}} {tmp_path}/entrant.py {{output}} {flag}" for flag in ("{steps}", "--seconds {seconds}")
    )
    table = {name: {"about": "", "command": command} for name, command in (("one", by_steps), ("two", by_seconds))}
    (tmp_path / "entrants.yaml").write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr(in_turns, "score", lambda *_: {"value": 1.25})
    flags = [str(data), str(tmp_path / "runs"), "--any-data", "--entrants-file", str(tmp_path / "entrants.yaml")]
    for seeds in (["0"], ["0", "1"]):
        in_turns.main([*flags, "--entrants", "one=3", "two=4", "--seeds", *seeds])
    printed = capsys.readouterr().out
    assert re.search(r"^one +3 +1\.250 +\(1\.250-1\.250\) +\d+\.\d +1\.00 ", printed, re.MULTILINE), printed
    assert read_json(tmp_path / "runs" / "seed-1.json")["steps"] == {"one": 3, "two": 4}
    for entrants, line in {
        "one=4": r"\S+ is of other entrants or steps",
        "one=0": "--entrants must be NAME=STEPS",
    }.items():
        with pytest.raises(SystemExit, match=rf"^error: {line}[^\n]*$"):
            in_turns.main([*flags, "--entrants", entrants])
    (tmp_path / "runs" / "seed-0.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^error: \S+seed-0\.json must be a result [^\n]* Delete it[^\n]*$"):
        in_turns.main([*flags, "--entrants", "one=3", "two=4"])
    with pytest.raises(SystemExit, match=r"^error: --torch-python is required by torch-muon: [^\n]*$"):
        in_turns.main([str(data), str(tmp_path), "--any-data", "--entrants", "torch-muon=3"])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--entrants", "none"], "--entrants must be among quick-start, "),
        (["--entrants", "torch-muon", "--any-data"], "--torch-python is required by torch-muon: "),
        ([], "data must be a folder that prepare.py wrote; received "),
    ],
)
def test_a_race_that_cannot_start_says_why(flags, line, tmp_path):
    with pytest.raises(SystemExit, match=rf"^error: {line}[^\n]*$"):
        race.main([str(tmp_path), str(tmp_path / "runs"), *flags])


@pytest.mark.slow
def test_pytorch_races_on_a_tiny_text(torch_python, tmp_path, monkeypatch, capsys):
    def make_text(folder):
        (folder / "text").mkdir(parents=True)
        for seed, split in enumerate(text.SPLITS):
            write_generated_text(tmp_path / "text", 100_000, seed)
            texts = (tmp_path / "text").read_text(encoding="utf-8").split("\n")
            write_jsonl(folder / "text" / f"{split}.jsonl", *({"text": document} for document in texts))

    monkeypatch.setattr(prepare, "TOKENIZER_FLAGS", ("--vocab-size", "400"))
    prepare.prepare(tmp_path / "data", make_text)
    table = TABLE.read_text(encoding="utf-8").replace("{seconds}", "{seconds} --max-steps {steps}")
    (tmp_path / "entrants.yaml").write_text(table, encoding="utf-8")
    monkeypatch.setattr(race, "NUM_WORDS", 20)
    flags = ["--seconds", "500", "--steps", "3", "--torch-python", str(torch_python), "--entrants", "torch-muon"]
    assert run_race(tmp_path / "data", tmp_path, *flags) == 0
    (result_file,) = (tmp_path / "runs" / "torch-muon").glob("*/seed-4/result.json")
    assert 0.5 < read_json(result_file)["value"] < 8
    assert re.search(r"^torch-muon +\d\.\d+ ", capsys.readouterr().out, re.MULTILINE)
