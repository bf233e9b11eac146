"""Programs of benchmarks/peers that need PyTorch run in an environment of their own, without TensorFlow."""

import os
import subprocess
import venv
from pathlib import Path

REQUIREMENTS = ("torch==2.13.0", "transformers==4.57.*", "accelerate==1.*")


def make_torch_environment(folder: Path) -> str:
    """Install PyTorch and transformers in a new environment and return its interpreter."""
    venv.create(folder, with_pip=True)
    interpreter = str(folder / "bin" / "python")
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
    return interpreter


def torch_variables() -> dict[str, str]:
    """Copy this process's variables but for what would make transformers look for TensorFlow there."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORCE_TF_AVAILABLE")}
    return kept | {"HF_HUB_OFFLINE": "1"}
