"""Fine-tune a model to choose one of several texts, as in SWAG, RACE and COPA."""

import sys

try:
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from finetuning.config.settings import ChoiceConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(ChoiceConfig, "finetuning.tasks.choice:ChoiceJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
