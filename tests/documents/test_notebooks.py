"""The notebooks: executed in git, their commands parsed, and run from top to bottom as a reader would."""

import ast
import base64
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from mlm_common.corpus.builtin import python_files, read_files
from notebooks.execute import DRAWING_CODE, DRAWN, EXECUTED, cells_sha256, drawing_code_sha256, without_outputs
from tests.fixtures.commands import parse
from tests.fixtures.jax_devices import devices_of_jax
from tests.fixtures.notebooks import COMPARISON, FINETUNING, NOTEBOOKS, WALKTHROUGH, code_cells
from tests.fixtures.recorded_runs import write_run
from train.runtime import machines, runtime_choice

PNG = b"\x89PNG\r\n\x1a\n"
CELL_SECONDS = 1800
REPO = "alice/walkthrough"
# Of the walkthrough.
MODEL = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
SMALLER = {
    "--limit 8000": "--limit 500",
    "--vocab-size 2048": "--vocab-size 512",
    "--max-steps 300": f"--max-steps 12 --per-replica-batch-size 8 --config-overrides {MODEL}",
}


def run_notebook(
    path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, smaller: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run all cells in a kernel of their own, with other numbers in them, and return them by id."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = nbformat.writes(without_outputs(nbformat.read(path, as_version=4)))
    for number, other in (smaller or {}).items():
        assert text.count(number) == 1
        text = text.replace(number, other)
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(path.parent)}}).execute()
    return {cell.id: cell for cell in notebook.cells}


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell: Any) -> list[bytes]:
    datas = [output.data for output in cell.outputs if "data" in output]
    return [base64.b64decode(data["image/png"]) for data in datas if "image/png" in data]


@pytest.mark.parametrize("path", [WALKTHROUGH, COMPARISON, FINETUNING])
def test_notebooks_are_valid_and_executed(path):
    """Of their cells as they are now; `python notebooks/execute.py` brings the outputs up to date."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.get(EXECUTED) == cells_sha256(notebook)
    assert notebook.metadata.get(DRAWN) == drawing_code_sha256(), "its pictures are older than the code that draws them"
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id)  # a name, so that it stays when cells come and go
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert cell.execution_count
            assert not [output for output in cell.outputs if output.output_type == "error"]
            assert all(output.text.strip() for output in cell.outputs if output.output_type == "stream")
    assert any(picture.startswith(PNG) for cell in notebook.cells if "outputs" in cell for picture in pictures(cell))


def test_all_code_that_draws_is_watched():
    """Of packages whose pictures a notebook shows."""
    packages = ("mlm_common", "tokenizer_training", "train", "finetuning")
    files = [path for package in packages for path in (NOTEBOOKS.parent / package).rglob("*.py")]
    draws = [path for path in files if "from matplotlib" in path.read_text(encoding="utf-8")]
    assert {str(path.relative_to(NOTEBOOKS.parent)) for path in draws} == set(DRAWING_CODE)


@pytest.mark.parametrize("path", [WALKTHROUGH, COMPARISON, FINETUNING])
def test_links_of_notebooks_lead_somewhere(path):
    """A badge for Colab needs the address of a repository."""
    prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if target.startswith("http"):
            assert not target.endswith("/github/"), target
        else:
            assert (path.parent / target).is_file(), target


@pytest.mark.parametrize("path", [WALKTHROUGH, COMPARISON, FINETUNING])
def test_notebooks_name_no_folder_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert str(NOTEBOOKS.parent) not in text
    assert not re.search(r"/home/|/tmp/|/root/|/work/", text)


def walkthrough_settings(quick: bool, tpu_name: str) -> dict[str, Any]:
    """Compute the variables of the walkthrough's own settings by its cells."""
    cells = code_cells(WALKTHROUGH)
    variables: dict[str, Any] = {"PYTHON": "python", "COMPILER_PYTHON": "python", "printed": "8\n", "KEEP": ""}
    exec(cells["settings"], variables)
    variables |= {"QUICK": quick, "TPU_NAME": tpu_name, "HUB_MODEL_ID": REPO}
    exec(cells["sizes"], variables)
    for name in ("plan", "fill"):  # what these cells set before their commands
        exec("\n".join(line for line in cells[name].splitlines() if not line.startswith("!")), variables)
    return variables


@pytest.mark.parametrize(("quick", "tpu_name"), [(True, ""), (False, ""), (False, "local")])
def test_commands_of_the_walkthrough(quick, tpu_name):
    variables = walkthrough_settings(quick, tpu_name)
    source = "\n".join(code_cells(WALKTHROUGH).values()).replace("\\\n", "")
    lines = re.findall(r"^ *!(.+)$", source, flags=re.M)
    (preflight,) = re.findall(r"%%project \{COMPILER_PYTHON\} (.+)", code_cells(WALKTHROUGH)["preflight"])
    commands = [shlex.split(eval(f"f'''{line}'''", variables)) for line in lines]
    commands.append(shlex.split(eval(f"f'''python train/tpu_preflight.py {preflight}'''", variables)))
    scripts = [script for _, script, *_ in commands]
    assert len(set(scripts)) == 6
    for _, script, *flags in commands:
        assert parse(script, flags)


KEEPING = ("drive", "bucket", "hub")


def kept(monkeypatch: pytest.MonkeyPatch, place: str, **settings: str) -> tuple[dict[str, Any], list[str]]:
    """Execute the cells that keep a run, on a stand-in for Colab; returns their variables, and what they asked for."""
    asked: list[str] = []
    colab = {
        "google.colab": SimpleNamespace(),
        "google.colab.drive": SimpleNamespace(mount=lambda folder: asked.append(f"mount {folder}")),
        "google.colab.auth": SimpleNamespace(authenticate_user=lambda: asked.append("log in")),
        "google.colab.userdata": SimpleNamespace(get=lambda name: asked.append(name) or "a token"),
    }
    for name, module in colab.items():
        monkeypatch.setitem(sys.modules, name, module)
        setattr(colab["google.colab"], name.rpartition(".")[2], module)
    for name in ("DRIVE_FOLDER", "BUCKET", "ON_HUB", "HUB_MODEL_ID"):
        monkeypatch.setenv(f"MLM_{name}", settings.get(name, ""))
    monkeypatch.setenv("HF_TOKEN", "")
    cells = code_cells(WALKTHROUGH)
    variables: dict[str, Any] = {"find_place": lambda: place}
    for name in ("settings", *KEEPING):
        exec(cells[name], variables)
    return variables, asked


@pytest.mark.parametrize(
    ("settings", "work", "asked"),
    [
        ({}, "runs/walkthrough", []),
        ({"DRIVE_FOLDER": "mlm"}, "/content/drive/MyDrive/mlm", ["mount /content/drive"]),
        ({"BUCKET": "my-bucket/mlm"}, "gs://my-bucket/mlm", ["log in"]),
        ({"HUB_MODEL_ID": REPO}, "runs/walkthrough", ["HF_TOKEN"]),
        ({"HUB_MODEL_ID": REPO, "ON_HUB": "start"}, "runs/walkthrough", ["HF_TOKEN"]),
        ({"HUB_MODEL_ID": REPO, "ON_HUB": "resume"}, "runs/walkthrough", ["HF_TOKEN"]),
    ],
)
def test_a_run_is_kept_where_a_cell_says(settings, work, asked, monkeypatch):
    monkeypatch.delenv("MLM_WORK", raising=False)
    variables, asked_for = kept(monkeypatch, "Colab", **settings)
    assert (variables["WORK"], asked_for) == (work, asked)
    data = [
        "--preset",
        "tiny-cpu",
        "--max-steps",
        "9",
        "--train-dataset",
        "a",
        "--eval-dataset",
        "b",
        "--output-dir",
        "c",
    ]
    hub = parse("train/run_mlm.py", [*data, *variables["KEEP"].split(), "--hub-model-id", REPO]).hub
    on_hub = settings.get("ON_HUB")
    assert hub.hub_strategy == ("checkpoint" if on_hub else "end")
    assert hub.resume_from_hub == (on_hub == "resume")


def test_the_hub_keeps_no_run_without_a_repository(monkeypatch):
    with pytest.raises(SystemExit, match="Set HUB_MODEL_ID"):
        kept(monkeypatch, "this machine", ON_HUB="start")


def test_the_walkthrough_connects_by_jax_where_tensorflow_has_no_tpu(tpu_machine, monkeypatch, capsys):
    tpu_machine("vfio/0", TPU_ACCELERATOR_TYPE="v5litepod-1")
    monkeypatch.setattr(machines, "has_tensorflow_for_tpus", lambda: False)
    monkeypatch.setattr(runtime_choice, "is_installed", lambda names: names == runtime_choice.JAX_FOR_TPUS)
    monkeypatch.setattr(sys, "argv", ["-c", "local"])
    magic, _, program = code_cells(WALKTHROUGH)["device"].partition("\n")
    assert magic == "%%project {TPU_NAME}"
    with devices_of_jax(1):
        exec(program, {})
    chosen, num_replicas = capsys.readouterr().out.splitlines()
    assert chosen == "--runtime jax: JAX supports the TPU, the installed TensorFlow does not"
    assert num_replicas == "1"


@pytest.mark.parametrize(("glue_task", "extra"), [("", "tpu"), ("sst2", "jax-tpu")])
def test_commands_of_the_finetuning(glue_task, extra, monkeypatch):
    """Those that `watch` runs; the plan is the first of them with one more flag."""
    monkeypatch.setenv("MLM_GLUE_TASK", glue_task)
    cells, commands = code_cells(FINETUNING), []
    variables: dict[str, Any] = {"PYTHON": "python", "find_extra": lambda: extra}
    variables["watch"] = lambda _, command, *__, **___: commands.append(command)
    for name in ("settings", "plan", "train", "own-train", "embed", "search"):
        exec("\n".join(line for line in cells[name].splitlines() if not line.startswith("!")), variables)
    assert "!{PYTHON} {TRAIN} --dry-run" in cells["plan"]
    commands.append(variables["SEARCH"])
    for command, script in zip(commands, ("run_classification", "run_task", "run_embedding", "search"), strict=True):
        path, *flags = shlex.split(command)
        assert path == f"finetuning/{script}.py"
        assert script != "run_classification" or "--tpu-name local --bfloat16" in command
        assert parse(path, flags)


@pytest.mark.parametrize("path", [WALKTHROUGH, COMPARISON, FINETUNING])
def test_what_cells_import_from_the_project_is_there(path):
    cells = "\n".join(code_cells(path).values()).replace("\\\n", "")
    without_commands = ast.parse(re.sub(r"^( *)[!%].*$", r"\1pass", cells, flags=re.M))
    for node in (node for node in ast.walk(without_commands) if isinstance(node, ast.ImportFrom)):
        package = NOTEBOOKS.parent / str(node.module).replace(".", "/")
        module = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
        if (NOTEBOOKS.parent / str(node.module).partition(".")[0]).exists():
            for alias in node.names:
                defined = rf"^(def |class |[\w, ]*\b){alias.name}\b"
                assert re.search(defined, module.read_text(encoding="utf-8"), flags=re.M), f"{module}: {alias.name}"


@pytest.mark.slow
def test_the_walkthrough(cloud_storage, hub_server, tmp_path, monkeypatch):
    """All of it on the CPU, its folder in Cloud Storage, its model pushed to the Hub; both stand-ins on loopback.

    Of the built-in corpus one package, since each of three cells would read it all.
    """
    documents = read_files(list(python_files([str(Path(np.__file__).parent)])))
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
    )
    kept = {"MLM_BUCKET": f"{cloud_storage.bucket_url.removeprefix('gs://')}/walkthrough", "MLM_ON_HUB": "start"}
    settings = {"MLM_QUICK": "1", "MLM_HUB_MODEL_ID": REPO} | kept
    environment = cloud_storage.environment | hub_server.environment | settings
    corpus = {"--dataset-name builtin": f"--data-files {tmp_path / 'docs.jsonl'}"}
    cells = run_notebook(WALKTHROUGH, environment, monkeypatch, SMALLER | corpus)

    assert printed(cells["device"]).split()[-1] == "1"
    assert "▁" in printed(cells["segmentation"])
    assert "[MASK]" in printed(cells["row"])
    assert re.search("Skipped: The preflight needs|modelled step time", printed(cells["preflight"]))
    for name in ("tokenizer", "train"):
        assert [picture.startswith(PNG) for picture in pictures(cells[name])] == [True], name
    line = re.search(r"^validation loss +[\d.]+", printed(cells["train"]), flags=re.M)
    assert line[0] in printed(cells["evaluate"])
    assert re.search(r"^ +[\d.]+%  \S+", printed(cells["fill"]), flags=re.M)

    pushed = hub_server.files(REPO)
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(pushed)
    assert pushed["model.safetensors"] == cloud_storage.objects()["walkthrough/model/export/model.safetensors"]
    assert pushed["loss.png"].startswith(PNG)
    assert "run.json" in hub_server.files(REPO, revision="checkpoints")


@pytest.mark.slow
def test_the_finetuning(tiny_start, tmp_path, monkeypatch):
    """From the tiny model, whose rows are shorter, in a few steps."""
    settings = {"MLM_INIT_FROM": str(tiny_start / "start"), "MLM_WORK": str(tmp_path)}
    smaller = {"--max-seq-length 64": "--max-seq-length 30 --length-buckets 30", "--num-epochs 3": "--max-steps 6"}
    smaller |= {
        "pairs[400:]": "pairs[40:400]",
        "pairs[:400]": "pairs[:40]",
        "for pair in pairs))": "for pair in pairs[:400]))",
    }
    cells = run_notebook(FINETUNING, settings, monkeypatch, smaller)
    assert "900 to train on, 200 to evaluate on" in printed(cells["plan"])
    figures = dict(re.findall(r"^(\w+) +([\d.]+|false|true)$", printed(cells["scores"]).lower(), flags=re.M))
    assert {"eval_accuracy", "eval_guess_accuracy", "predict_accuracy"} <= set(figures)
    assert re.search(r"^(datasets|huggingface_hub|matplotlib|numpy): \w", printed(cells["scores"]), flags=re.M)
    assert [picture.startswith(PNG) for picture in pictures(cells["matrix"])] == [True]
    for name in ("train", "own-train", "embed"):
        assert [picture.startswith(PNG) for picture in pictures(cells[name])] == [True], name
    assert "kappa" in printed(cells["own-train"])
    assert len(re.findall(r"^ +-?\d\.\d{4}  \S", printed(cells["search"]), flags=re.M)) == 6
    assert re.fullmatch(r"(-?\d\.\d{3}  \S.*\n){3}", printed(cells["search-again"]))
    assert (tmp_path / "stars" / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_comparison(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / name, global_batch_rows=rows) for name, rows in (("small", 8), ("large", 32))]
    settings = {"MLM_RUNS": " ".join(map(str, runs)), "MLM_PICTURE": str(tmp_path / "comparison.png")}
    cells = run_notebook(COMPARISON, settings, monkeypatch)
    assert re.search(r"^small .*\n^large ", printed(cells["table"]), flags=re.M)
    assert [picture.startswith(PNG) for picture in pictures(cells["curves"])] == [True]
    assert printed(cells["figures"]).count("learning_rate") == 4
