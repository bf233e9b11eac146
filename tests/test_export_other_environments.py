"""The export, read by PyTorch in environments with transformers 4 and 5 and no TensorFlow.

The environments are made in the folder named by MLM_TEST_ENVIRONMENTS, and found there again; without it, in a
temporary one.
"""

import json
import os
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import CONFIGS, padded_batch, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

REQUIREMENTS = {"transformers-4": "transformers==4.57.*", "transformers-5": "transformers>=5,<6"}
TORCH = "torch==2.13.0"
TOLERANCE = 1e-4
SENTENCES = ["a function returns the [MASK] of a file", "the [MASK]", "Text, with ünknown signs in 3 [MASK]."]
MODEL_MAX_LENGTH = 60

# Prints, for each export, what was loaded and how far its logits are from TensorFlow's.
READER = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

sentences = json.loads(sys.argv[2])
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model, loading = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tensorflow = np.load(folder / "tensorflow.npz")
    encoded = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    batches = {
        "random": {name: torch.tensor(tensorflow[name]).long() for name in ("input_ids", "attention_mask")},
        "sentences": dict(encoded),
    }
    differences = {}
    for name, batch in batches.items():
        with torch.no_grad():
            logits = model(**batch).logits.numpy()
        expected = tensorflow[name + "_logits"]
        attended = batch["attention_mask"].bool().numpy()
        assert logits.shape == expected.shape, (logits.shape, expected.shape)
        differences[name] = float(np.abs(logits - expected)[attended].max())
    print(json.dumps({
        "name": folder.name,
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "wrong_keys": {kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys},
        "ids": encoded["input_ids"].tolist(),
        "inputs": sorted(encoded),
        "max_length": tokenizer.model_max_length,
        "differences": differences,
    }))
"""


@pytest.fixture(scope="module", params=REQUIREMENTS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch and one generation of transformers."""
    root = os.environ.get("MLM_TEST_ENVIRONMENTS") or tmp_path_factory.mktemp("environments")
    folder = Path(root, request.param)
    interpreter = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", TORCH, REQUIREMENTS[request.param]], check=True)
        complete.touch()
    return interpreter


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder of exports of all architectures, each with TensorFlow's logits; and the ids of the sentences."""
    from train.export import export_model

    root = tmp_path_factory.mktemp("exports")
    tokenizer = tiny_tokenizer()
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="np")
    sentences = {name: encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask")}
    for name in CONFIGS:
        # An epsilon that is far from the defaults shows where a class does not read its configuration's.
        model = tiny_model(name, max_position_embeddings=MODEL_MAX_LENGTH + 2, layer_norm_eps=0.05)
        random_batch, _ = padded_batch(model)
        folder = root / name.replace(" ", "_")
        export_model(model, tokenizer, str(folder), model_max_length=MODEL_MAX_LENGTH)
        np.savez(
            folder / "tensorflow.npz",
            random_logits=model(random_batch).logits.numpy(),
            sentences_logits=model(sentences).logits.numpy(),
            **random_batch,
        )
    return root, encoded["input_ids"].tolist()


def test_transformers_on_torch_reads_every_export_as_tensorflow_made_it(
    python: Path, exports: tuple[Path, list[list[int]]]
) -> None:
    root, expected_ids = exports
    # What this process set for TensorFlow would make transformers look for it there.
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_TF_AVAILABLE"}
    shown = subprocess.run(
        [python, "-c", READER, str(root), json.dumps(SENTENCES)],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    results = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {result["name"] for result in results} == {name.replace(" ", "_") for name in CONFIGS}
    for result in results:
        print(python.parent.parent.name, result["name"], result["differences"])
        assert result["class"].endswith("ForMaskedLM"), result
        assert result["dtype"] == "torch.float32", result
        assert result["wrong_keys"] == {}, result
        assert result["ids"] == expected_ids, result
        assert result["max_length"] == MODEL_MAX_LENGTH, result
        assert max(result["differences"].values()) < TOLERANCE, result
