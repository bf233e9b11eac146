"""What a run pushed, read back from the Hub with PyTorch, by transformers 4 and 5; and the card's lines of code."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_run import run_flags
from tests.servers.fixtures import HubHandle
from train.model.from_pretrained import load_model
from train.run_mlm import main

pytestmark = pytest.mark.slow

REPO = "alice/tiny"
BRANCH = "trial"
EXAMPLE = "a corpus of [MASK] words"
TOLERANCE = 1e-4

# Prints the logits of rows of ids, and what the pipeline makes of a sentence.
READER = """
import json, sys
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

repo, revision, rows, sentence = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
model, loading = AutoModelForMaskedLM.from_pretrained(repo, revision=revision, output_loading_info=True)
model.eval()
tokenizer = AutoTokenizer.from_pretrained(repo, revision=revision)
with torch.no_grad():
    logits = model(torch.tensor(rows)).logits.tolist()
filled = pipeline("fill-mask", model=repo, revision=revision)(sentence)
print(json.dumps({
    "class": type(model).__name__,
    "wrong_keys": {kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys},
    "logits": logits,
    "mask": [tokenizer.mask_token, tokenizer.mask_token_id],
    "filled": filled,
}))
"""


@pytest.fixture
def pushed(hub_here: HubHandle, shards: Path, tmp_path: Path) -> tuple[HubHandle, Path]:
    """A run that pushed to a branch of a private repository, and its folder."""
    more = ("--hub-model-id", REPO, "--hub-private", "--hub-revision", BRANCH, "--hub-example", EXAMPLE)
    assert main(run_flags(shards, tmp_path / "run", *more)) == 0
    return hub_here, tmp_path / "run"


@pytest.mark.usefixtures("one_device")
def test_what_was_pushed_is_read_back(python: Path, pushed: tuple[HubHandle, Path]) -> None:
    server, folder = pushed
    rows = np.random.default_rng(0).integers(5, 48, (3, 16))
    arguments = (REPO, BRANCH, json.dumps(rows.tolist()), EXAMPLE)
    found = json.loads(output_of(python, READER, *arguments, environment=server.environment))
    assert found["class"] == "RobertaForMaskedLM"
    assert found["wrong_keys"] == {}
    assert found["mask"] == ["[MASK]", 4]
    assert len(found["filled"]) == 5
    expected = load_model(str(folder / "export"))({"input_ids": rows}).logits
    np.testing.assert_allclose(found["logits"], expected, atol=TOLERANCE)

    card = server.files(REPO, revision=BRANCH)["README.md"].decode()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    lines = output_of(python, snippet, environment=server.environment).splitlines()
    assert [line.split()[0] for line in lines] == [str(round(one["score"], 3)) for one in found["filled"]]
    assert [line.split(maxsplit=1)[1] for line in lines] == [one["sequence"] for one in found["filled"]]
