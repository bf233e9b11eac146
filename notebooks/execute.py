"""Run the notebooks with their quick settings and keep their outputs, as they are committed.

    python notebooks/execute.py            # all three, about ten minutes on two cores
    python notebooks/execute.py finetune   # one, from what the others left in runs/

`finetune` and `compare_runs` need the model of `make quickstart`: run that before.

Each notebook's metadata then has the hash of its cells, and of the code that drew its pictures: a test compares them.
"""

import ast
import base64
import hashlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).resolve().parent
PROJECT = NOTEBOOKS.parent
# In the order in which each finds what the one before has made.
SETTINGS = {
    "pretrain_mlm_tpu": {"MLM_QUICK": "1", "MLM_WORK": "runs/walkthrough"},
    "finetune": {"MLM_INIT_FROM": "runs/quickstart/model", "MLM_WORK": "runs/finetune"},
    "compare_runs": {"MLM_RUNS": "runs/quickstart/model runs/walkthrough/model", "MLM_PICTURE": "runs/comparison.png"},
}
CELL_SECONDS = 3600
NUM_COLORS = 128
EXECUTED, DRAWN = "executed_cells_sha256", "drawing_code_sha256"
DRAWING_CODE = ("mlm_common/figures.py", "tokenizer_training/report.py", "train/metrics/run_curves.py")


def cells_sha256(notebook: Any) -> str:
    """Hash the code of all cells."""
    codes = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()


def drawing_code_sha256() -> str:
    """Hash the functions that draw the pictures of the notebooks: those that have axes or a figure."""
    digest = hashlib.sha256()
    for name in DRAWING_CODE:
        source = (PROJECT / name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            code = str(ast.get_source_segment(source, node)) if isinstance(node, ast.FunctionDef) else ""
            if re.search(r"\b(axes|figure)\b", code):
                digest.update(code.encode())
    return digest.hexdigest()


def without_outputs(notebook: Any) -> Any:
    """Take the outputs away, in place, and return the notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def execute(name: str) -> None:
    """Run a notebook and write it with its outputs."""
    path = NOTEBOOKS / f"{name}.ipynb"
    os.environ.update(SETTINGS[name])
    notebook = without_outputs(nbformat.read(path, as_version=4))
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=CELL_SECONDS, resources=resources, record_timing=False).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined_streams(cell.outputs)
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = plain(output.text)
            elif "data" in output:
                output.data.pop("text/plain", None)
                if "image/png" in output.data:
                    output.data["image/png"] = smaller_picture(output.data["image/png"])
                output.metadata = {}
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata[EXECUTED], notebook.metadata[DRAWN] = cells_sha256(notebook), drawing_code_sha256()
    nbformat.write(notebook, path)


def joined_streams(outputs: Sequence[Any]) -> list[Any]:
    """Join what was printed piece by piece, so that all states of a progress bar are in one line."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def smaller_picture(png: str) -> str:
    """Write a PNG, in base64, with a palette, which plots need no more than: a third of the size."""
    picture, written = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    picture.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def plain(text: str) -> str:
    """Leave out this machine's folders, and all but the last state of progress bars."""
    environment = Path(sys.executable).parent.parent
    for folder, name in ((f"{PROJECT}/", ""), (str(environment), ".venv"), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text).replace("\r\n", "\n")  # as terminals end lines
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))


def main(argv: Sequence[str]) -> int:
    """Run the notebooks that are named, or all."""
    for name in argv or SETTINGS:
        print(name, flush=True)
        execute(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
