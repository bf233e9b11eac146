"""Fine-tune a model on a custom task: a class in a Python file, with its data, head and metric."""

import sys

try:
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from finetuning.config.settings import CustomConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(CustomConfig, "finetuning.tasks.custom:CustomJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
