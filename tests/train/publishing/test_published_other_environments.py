"""What a run pushed, read from the Hub by the lines of code on its card, with transformers 4 and 5 on PyTorch."""

import re

import pytest

from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_run import run_flags
from train.fill_mask import fill_masks
from train.run_mlm import main

REPO, BRANCH = "alice/tiny", "trial"
EXAMPLE = "a corpus of [MASK] words"


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_what_was_pushed_fills_masks_as_the_export_does(python, hub_here, shards, tmp_path):
    """From a branch of a private repository."""
    more = ("--hub-model-id", REPO, "--hub-private", "--hub-revision", BRANCH, "--hub-example", EXAMPLE)
    more += ("--max-steps", "1", "--eval-steps", "1")
    assert main(run_flags(shards, tmp_path / "run", *more)) == 0
    card = hub_here.files(REPO, revision=BRANCH)["README.md"].decode()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    (expected,) = fill_masks(str(tmp_path / "run" / "export"), [EXAMPLE])
    assert len(expected) == 5
    lines = output_of(python, snippet, environment=hub_here.environment).splitlines()
    assert [line.split()[0] for line in lines] == [str(round(one["score"], 3)) for one in expected]
    assert [line.split(maxsplit=1)[1] for line in lines] == [one["sequence"] for one in expected]
