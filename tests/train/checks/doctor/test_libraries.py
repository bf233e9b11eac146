"""The doctor on a TensorFlow that cannot be used: broken, crashing, hanging, unseen."""

import shutil
import venv
from pathlib import Path

import pytest
import yaml

from tests.fixtures.doctor_cases import config_of, modules
from train.checks.doctor import libraries
from train.checks.doctor.findings import findings_of

CONFIG = config_of()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "ok import TensorFlow 2.21.0, "),
        ({"tensorflow____init__": "raise ImportError('libcudart.so.12: missing')"}, "failed: ImportError: libcudart"),
        ({"tensorflow____init__": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"}, "this CPU lacks (AVX)"),
        ({"tensorflow____init__": "import os; os.abort()"}, "crashed (SIGABRT): "),
        ({"tensorflow____init__": "import time; time.sleep(600)"}, "did not answer within 1 s."),
        ({"transformers__utils": "is_tf_available = lambda: False"}, "transformers does not see TensorFlow 2.21.0"),
        ({"transformers__modeling_tf_utils": None}, "No module named 'transformers.modeling_tf_utils'"),
        ({"transformers__modeling_tf_utils": "raise ValueError('is Keras 3')"}, "failed: ValueError: is Keras 3"),
    ],
    ids=["well", "broken", "illegal", "abort", "hangs", "unseen", "transformers 5", "keras 3"],
)
def test_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    modules(tmp_path, monkeypatch, **changed)
    monkeypatch.setattr(libraries, "IMPORT_SECONDS", 1.0 if "sleep" in str(changed) else 100.0)
    (found,) = libraries.check_import(CONFIG)
    assert message in " ".join(str(found).split())


def test_remains_of_a_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment without any other: a folder without `__init__.py` gives way to a whole one anywhere."""
    venv.create(tmp_path / "venv")
    modules(tmp_path, monkeypatch, tensorflow____init__=None, tensorflow__core="")
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)
    monkeypatch.setattr(libraries.sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (found,) = libraries.check_import(CONFIG)
    assert "failed: ImportError: only remains of a TensorFlow that was uninstalled" in found.text
    shutil.rmtree(tmp_path / "tensorflow")
    (found,) = libraries.check_import(CONFIG)
    assert "failed: ModuleNotFoundError: No module named 'tensorflow'" in found.text


def test_a_check_that_breaks_is_an_error_and_ends_alone() -> None:
    def broken():
        raise RuntimeError("no such device")
        yield

    (found,) = findings_of("GPU", broken)
    assert (found.status, found.subject) == ("error", "GPU")
    assert "could not be checked: RuntimeError: no such device" in found.text


def test_gpus_that_tensorflow_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(libraries.check_gpus(CONFIG, tmp_path))
    (tmp_path / "nvidia0").touch()
    config = "class config: list_physical_devices = staticmethod(lambda kind: {})"
    modules(tmp_path, monkeypatch, tensorflow____init__=config.format("[]"))
    (found,) = libraries.check_gpus(CONFIG, tmp_path)
    assert found.status == "warning"
    assert "the machine has 1, but TensorFlow sees none" in found.text
    one = "[type('Device', (), {'name': kind})]"
    modules(tmp_path, monkeypatch, tensorflow____init__=config.format(one))
    assert [str(found.status) for found in libraries.check_gpus(CONFIG, tmp_path)] == ["ok"]
