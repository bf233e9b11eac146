"""What the pages tell a newcomer to run: in the environment that they name, with the files that they name."""

import re
import shlex
from pathlib import Path

import pytest

from finetuning import predict, run_classification, run_task
from tests.fixtures.finetuned_runs import run_on_one_device
from tests.fixtures.other_environments import output_of
from tests.fixtures.results import read_json

PROJECT = Path(__file__).parents[2]
FINETUNING = "docs/guides/finetuning.md"
PYTORCH = "python3 -m venv .venv-torch\n.venv-torch/bin/pip install torch transformers\n"
SNIPPET = re.compile(r"```python\n(.*?)```", flags=re.S)


def flags_of(script: str, page: str, **replaced: str) -> list[str]:
    """Find the flags of a page's first command that runs a script, some of their values replaced."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    command, *_ = re.findall(rf"^python {script} ((?:.*\\\n)*.*)$", text, flags=re.M)
    flags = shlex.split(command.replace("\\\n", " "))
    for name, value in replaced.items():
        flags[flags.index(f"--{name.replace('_', '-')}") + 1] = value
    return flags


def test_snippets_for_pytorch_come_after_an_environment_with_pytorch():
    """The environment of `install.py` has none."""
    num_snippets = 0
    for page in [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for snippet in SNIPPET.findall(text):
            if re.search(r"^(?:from|import) (?:torch|transformers|sentence_transformers)\b", snippet, flags=re.M):
                before = text[: text.index(snippet)]
                assert PYTORCH in before or "german.md#7-use-it-in-pytorch" in before, page
                num_snippets += 1
    assert num_snippets >= 3


@pytest.mark.slow
def test_the_snippet_opens_the_model_in_the_environment_that_it_names(python, finished_run):
    """But with a sentence that fits the tiny model's rows."""
    (snippet,) = SNIPPET.findall((PROJECT / "docs/tutorials/german.md").read_text(encoding="utf-8"))
    for typed, tiny in (("work/model/export", str(finished_run / "export")), ("Er ging in das ", "the ")):
        assert typed in snippet
        snippet = snippet.replace(typed, tiny)
    assert "'token_str'" in output_of(python, snippet)


@pytest.mark.slow
def test_the_example_of_classification_runs_as_typed(tiny_start, tmp_path, monkeypatch, capsys):
    """But from a tiny model, in a few steps."""
    monkeypatch.chdir(PROJECT)
    output = str(tmp_path / "reviews")
    flags = flags_of(
        "finetuning/run_classification.py", FINETUNING, init_from=str(tiny_start / "start"), output_dir=output
    )
    flags[flags.index("--max-seq-length") + 1] = "30"
    flags[flags.index("--num-epochs") + 1] = "1"
    run_on_one_device(run_classification.main, [*flags, "--length-buckets", "30"], eagerly=True)
    assert read_json(Path(output) / "all_results.json")["eval_samples"] == 12
    capsys.readouterr()
    assert predict.main(flags_of("finetuning/predict.py", FINETUNING, model=output)) == 0
    assert {"positive", "negative", "mixed"} <= set(re.findall(r"[a-z]+", capsys.readouterr().out))


def test_the_example_of_a_custom_task_is_planned_as_typed(tiny_start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    page, start, output = "docs/tutorials/custom_task.md", str(tiny_start / "start"), str(tmp_path / "stars")
    flags = flags_of("finetuning/run_task.py", page, init_from=start, output_dir=output, max_seq_length="30")
    assert run_task.main([*flags, "--dry-run"]) == 0
    assert re.search(r"36 .*12 ", capsys.readouterr().out)
