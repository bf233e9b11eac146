"""What a run leaves behind in its process."""

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from train.config.settings import HardwareConfig
from train.loop.lifecycle import failure_handling
from train.runtime.machines import Cluster
from train.step.train_step import set_precision


@pytest.mark.parametrize("is_compiled", [True, False])
def test_models_after_a_run_in_bfloat16_compute_in_float32(is_compiled):
    run: Any = SimpleNamespace(config=SimpleNamespace(hardware=HardwareConfig()), cluster=Cluster(), folder=None)
    with failure_handling(run, tf.distribute.get_strategy()):
        set_precision(bfloat16=True, is_compiled=is_compiled)
    assert tf_keras.mixed_precision.global_policy().name == "float32"
    assert not tf.config.optimizer.get_experimental_options()["auto_mixed_precision_onednn_bfloat16"]
