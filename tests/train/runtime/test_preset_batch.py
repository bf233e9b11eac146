"""What a run says where a preset's global batch is another one on its replicas."""

import logging

import pytest

from train.config.sources import parse_training_config
from train.runtime.plan import make_plan
from train.runtime.preset_batch import warn_of_other_batch


@pytest.mark.parametrize(
    ("num_replicas", "flags", "warning"),
    [
        (8, [], None),
        (4, ["--gradient-accumulation-steps", "8"], None),
        (4, ["--per-replica-batch-size", "16"], None),
        (4, ["--gradient-accumulation-steps", "1", "--global-batch-size", "512"], None),
        (
            4,
            [],
            "roberta-base-v5e-8 is tuned for 8 replicas; on 4 the global batch is 512 rows instead of 1,024. "
            "Pass --gradient-accumulation-steps 8 to keep it.",
        ),
        (
            64,
            [],
            "roberta-base-v5e-8 is tuned for 8 replicas; on 64 the global batch is 8,192 rows instead of 1,024. "
            "Pass --per-replica-batch-size 16 --gradient-accumulation-steps 1 to keep it.",
        ),
        (3, [], "roberta-base-v5e-8 is tuned for 8 replicas; on 3 the global batch is 384 rows instead of 1,024."),
        (8, ["--preset", "roberta-base"], None),
        (1, ["--preset", "tiny-cpu"], None),
        (
            2,
            ["--preset", "tiny-cpu"],
            "tiny-cpu is tuned for 1 replica; on 2 the global batch is 64 rows instead of 32. "
            "Pass --per-replica-batch-size 16 --gradient-accumulation-steps 1 to keep it.",
        ),
    ],
)
def test_what_becomes_of_a_presets_batch(
    num_replicas: int, flags: list[str], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    required = ["--preset", "roberta-base-v5e-8", "--train-dataset", "shards", "--output-dir", "out"]
    config = parse_training_config([*required, *flags], "")
    plan = make_plan(config.optimization, config.run, num_rows=10**6, max_length=512, num_replicas=num_replicas)
    with caplog.at_level(logging.WARNING):
        warn_of_other_batch(config, plan)
    assert [record.getMessage() for record in caplog.records] == ([warning] if warning else [])
