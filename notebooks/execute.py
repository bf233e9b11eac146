"""Run the notebooks with their quick settings, and save them with their outputs, to be committed.

    python notebooks/execute.py            # all three, about ten minutes on two cores
    python notebooks/execute.py finetune   # a single one, with the models that other runs left in runs/

`finetune` and `compare_runs` need the model of `make quickstart`, so run that first.

The metadata of each notebook then contains a hash of the notebook's cells, and a hash of the code that draws its plots.
A test checks that these hashes are up to date.
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
# {notebook: its settings}, in an order in which each notebook finds the models that it needs.
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
    """Return the hash of the code of all cells."""
    codes = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()


def drawing_code_sha256() -> str:
    """Hash the functions that draw the notebooks' plots, without their docstrings.

    These are the functions that mention axes or a figure.
    """
    digest = hashlib.sha256()
    for name in DRAWING_CODE:
        source = (PROJECT / name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef):
                continue
            code = str(ast.get_source_segment(source, node))
            if ast.get_docstring(node):
                code = code.replace(str(ast.get_source_segment(source, node.body[0])), "", 1)
            if re.search(r"\b(axes|figure)\b", code):
                digest.update(code.encode())
    return digest.hexdigest()


def without_outputs(notebook: Any) -> Any:
    """Remove the outputs in place, and return the notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def execute(name: str) -> None:
    """Run a notebook, and save it with its outputs."""
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
    """Join consecutive outputs of one stream, so that all states of a progress bar are in one line."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def smaller_picture(png: str) -> str:
    """Convert a PNG, in base64, to a palette, which is enough for plots and takes a third of the space."""
    picture, smaller = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    picture.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def plain(text: str) -> str:
    """Remove this machine's folders from a text, and all states of progress bars except the last."""
    environment = Path(sys.executable).parent.parent
    for folder, name in ((f"{PROJECT}/", ""), (str(environment), ".venv"), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text).replace("\r\n", "\n")  # terminals end lines with \r\n
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))


def main(argv: Sequence[str]) -> int:
    """Run the notebooks named in `argv`, or all of them."""
    for name in argv or SETTINGS:
        print(name, flush=True)
        execute(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
