r"""Pretrain a masked language model on TFRecord shards, on TPU, GPU or CPU, and export it for transformers.

Examples:
    python train/run_mlm.py --preset tiny-cpu --train-dataset work/shards/train \
        --eval-dataset work/shards/validation --output-dir work/model --dry-run
    python train/run_mlm.py --preset roberta-base-v5e-8 --tpu-name local --supervise \
        --train-dataset gs://my-bucket/shards/train --max-steps 20000 \
        --output-dir gs://my-bucket/model
    python train/run_mlm.py --init-from FacebookAI/roberta-base --learning-rate 5e-5 \
        --train-dataset work/shards/train --output-dir work/adapted
"""

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
from collections.abc import Sequence

from mlm_common.cli.process import run_as_script
from train.config.settings import parse_training_config
from train.runtime.supervisor import supervise_if_asked


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Read the settings, then train. `train_run` shows all steps: check, connect, build, restore, fit, publish."""
    config = parse_training_config(argv, __doc__)
    supervise_if_asked(config.run, __file__, argv)
    log_start(__file__)
    from train.loop.lifecycle import Pretraining, train_run  # imports transformers, not needed for --help

    train_run(config, Pretraining())


if __name__ == "__main__":
    run_as_script(main)
