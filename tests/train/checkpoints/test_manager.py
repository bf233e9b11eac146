"""The variables of a run: all of them come back in another model, and those of another model are refused."""

import numpy as np
import pytest

from mlm_common.errors import RunFailedError
from tests.fixtures.arrays import assert_same_arrays
from tests.fixtures.tiny_steps import build, one_cpu, token_rows, train
from train.checkpoints.manager import TrainingState


@pytest.mark.usefixtures("eagerly")
def test_all_that_a_step_changes_comes_back_or_nothing_does():
    trained, other = build(one_cpu()), build(one_cpu())
    first = TrainingState(other).read()
    train(trained, token_rows(), num_steps=2)
    saved = TrainingState(trained).read()
    changed = [name for name, array in saved.items() if not np.array_equal(array, first[name])]
    assert {name.split("/")[0] for name in changed} == {"model", "optimizer", "metrics"}

    name = max(saved, key=lambda name: saved[name].size)
    without = {other_name: array for other_name, array in saved.items() if other_name != name}
    for wrong in (
        without,
        {**saved, "model/another": np.zeros(1)},
        {**saved, name: saved[name].T},
        {**saved, name: saved[name].astype(np.float64)},
    ):
        with pytest.raises(RunFailedError, match="1 differ"):
            TrainingState(other).write(wrong)
        assert_same_arrays(TrainingState(other).read(), first)

    TrainingState(other).write(saved)
    assert_same_arrays(TrainingState(other).read(), saved)
    assert train(other, token_rows(), num_steps=1) == train(trained, token_rows(), num_steps=1)
