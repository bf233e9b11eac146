"""Environments with PyTorch, transformers 4 or 5, and no TensorFlow.

They are made in the folder named by MLM_TEST_ENVIRONMENTS, and found there again; without it, in a temporary one.
"""

import os
import subprocess
import venv
from pathlib import Path

import pytest

REQUIREMENTS = {"transformers-4": "transformers==4.57.*", "transformers-5": "transformers>=5,<6"}
TORCH = "torch==2.13.0"


@pytest.fixture(scope="session", params=REQUIREMENTS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch and one generation of transformers."""
    root = os.environ.get("MLM_TEST_ENVIRONMENTS") or tmp_path_factory.mktemp("environments")
    folder = Path(root, request.param)
    interpreter = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", TORCH, REQUIREMENTS[request.param]], check=True)
        complete.touch()
    return interpreter


def output_of(python: Path, program: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return what a program prints in another environment, without the Hub unless `environment` leads to one."""
    # What this process set for TensorFlow would make transformers look for it there.
    inherited = {name: value for name, value in os.environ.items() if name != "FORCE_TF_AVAILABLE"}
    shown = subprocess.run(
        [python, "-c", program, *arguments],
        env=inherited | {"HF_HUB_OFFLINE": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout
