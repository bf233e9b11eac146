"""The line of a run on a TPU with the measured time of a step beside the modelled one."""

import pytest

from tests.fixtures.plans import config_of, plan_of
from train.metrics.step_time import describe_step_time

WHAT = "TPU v5litepod-8, roberta, 110,651,648 parameters, compiled with XLA, TPU-optimized layers"
VERSIONS = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.20", "numpy": "2.0"}


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        (["--modelled-step-ms", "450"], "450 ms modelled, measured / modelled 1.50"),
        ([], "not modelled (tpu_preflight.py)"),
    ],
)
def test_the_line_has_all_that_the_time_depends_on(flags, beside):
    flags = ["--bfloat16", "--per-replica-batch-size", "32", "--gradient-accumulation-steps", "4", *flags]
    config = config_of(*flags, "--max-steps", "9", "--tpu-name", "local", "--runtime", "tensorflow")
    plan = plan_of(config, num_rows=5000, max_length=512, num_replicas=8)
    assert describe_step_time(0.675, config, plan, what=WHAT, versions=VERSIONS) == (
        f"675 ms a step measured, {beside}: {WHAT}, bfloat16, 32 rows x 4 x 8 replicas of 512 tokens, "
        "--runtime tensorflow, tensorflow-tpu 2.20.0, libtpu 0.0.20"
    )
