"""Bad input is refused before TensorFlow is imported, which takes up to half a minute."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, importlib, io, json, sys
statuses = {}
for name, (module, flags) in json.loads(sys.argv[1]).items():
    print(name, flush=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = importlib.import_module(module).main(flags)
        except SystemExit as error:
            status = error.code
    statuses[name] = [status, said.getvalue().strip().splitlines()[-1]]
print(json.dumps(statuses))
"""
# A stand-in: whoever imports it ends.
TENSORFLOW = "import os\nos.write(2, b'TensorFlow was imported')\nos._exit(99)"
FILL_MASK, PREDICT, SEARCH = "train.fill_mask", "finetuning.predict", "finetuning.search"
# {name: (module, flags, what is said)}; names in braces are files and folders of the test.
CASES = {
    "no mask": (FILL_MASK, "--model {start} --text a-function", "exactly one [MASK]"),
    "another mask": (FILL_MASK, "--model {start} --text a<mask>", "exactly one [MASK]"),
    "masks": (FILL_MASK, "--model {start} --text [MASK][MASK]", "has 2"),
    "too many predictions": (FILL_MASK, "--model {start} --text [MASK] --top-k 100000", "--top-k"),
    "no model": (FILL_MASK, "--model {missing}", "--model"),
    "no weights": (FILL_MASK, "--model {no_weights} --text [MASK]", "no_weights"),
    "no model to predict with": (PREDICT, "--model {missing} --text a", "--model"),
    "a model that predicts nothing": (PREDICT, "--model {start} --text a", "is a masked language model"),
    "no corpus": (SEARCH, "a --model {encoder} --corpus {missing}", "--corpus"),
    "no column": (SEARCH, "a --model {encoder} --corpus {texts} --text-column-names b", "b"),
    "no encoder": (SEARCH, "a --model {missing} --corpus {texts}", "--model"),
    "not an encoder": (SEARCH, "a --model {start} --corpus {texts}", "does not embed texts"),
    "no pairs": ("train.score_mlm", "--model {start} --minimal-pairs {missing}", "--minimal-pairs"),
    "no model to score": ("train.score_mlm", "--model {missing} --text {texts}", "--model"),
    "no checkpoint": ("train.export", "{missing}/checkpoints/step-00000003 {output}", "No such checkpoint"),
    "nothing to export": ("train.export", "{missing} {output}", "missing"),
    "no tokenizer to export": (
        "train.export",
        "{start} {output} --tokenizer {missing}",
        "--tokenizer: there is no folder",
    ),
    "a mistyped flag of the export": ("train.export", "a b --overwrte", "did you mean --overwrite?"),
    "a flag without its value": (
        "train.convert_bert",
        "a b --vocabulary",
        "--vocabulary needs a value: --vocabulary FILE",
    ),
    "two folders to write": (
        "train.convert_bert",
        "a b c",
        "unexpected argument 'c': the arguments without a flag must be ",
    ),
    "a length in words": ("recipes.whiten", "a b c --max-seq-length x", "--max-seq-length must be a whole number"),
    "no output": ("recipes.whiten", "a b", "are required: OUTPUT"),
    "nothing to convert": ("train.convert_bert", "{missing} {output}", "missing"),
    "nothing to whiten with": ("recipes.whiten", "{start} {missing} {output}", "--corpus"),
    "few texts": ("recipes.whiten", "{start} {texts} {output} --max-seq-length 20", "more than"),
    "long rows": ("recipes.whiten", "{start} {texts} {output} --max-seq-length 9999", "--max-seq-length"),
    "no shards": ("train.run_mlm", "--train-dataset {missing} --output-dir {output}", "missing"),
    "no slice": ("train.tpu_preflight", "--topology v9 --train-dataset {missing} --output-dir {output}", "--topology"),
    "nothing to train on": (
        "finetuning.run_classification",
        "--init-from {start} --train-file {missing} --output-dir {output}",
        "--train-file",
    ),
}


@pytest.fixture(scope="module")
def said(tiny_start, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """What each case ended with: its status, and the last line on standard error."""
    folder = tmp_path_factory.mktemp("bad-input")
    (folder / "tensorflow").mkdir()
    (folder / "tensorflow" / "__init__.py").write_text(TENSORFLOW, encoding="utf-8")
    texts = folder / "texts.jsonl"
    texts.write_text('{"text": "a function"}\n' * 3, encoding="utf-8")
    no_weights, encoder = (shutil.copytree(tiny_start / "start", folder / name) for name in ("no_weights", "encoder"))
    (no_weights / "model.safetensors").unlink()
    modules = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]
    (encoder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    places = {
        "start": tiny_start / "start",
        "texts": texts,
        "no_weights": no_weights,
        "encoder": encoder,
        "missing": folder / "missing",
        "output": folder / "output",
    }
    cases = {name: (module, flags.format(**places).split()) for name, (module, flags, _) in CASES.items()}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, PROJECT)))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    *begun, last = done.stdout.splitlines()
    assert done.returncode == 0, f"{begun[-1:]}, {last}: {done.stderr[-2000:]}"
    return {name: tuple(ended) for name, ended in json.loads(last).items()}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_without_tensorflow(name, said):
    status, line = said[name]
    assert (status, line.startswith("error: "), CASES[name][2] in line) == (2, True, True), line
