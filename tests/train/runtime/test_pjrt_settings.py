"""How TensorFlow comes to see a TPU: which machines get the PJRT settings, and a trial that dies, hangs or succeeds."""

import logging
import os
import sys
from pathlib import Path

import pytest

from mlm_common.errors import RunFailedError
from tests.fixtures.doctor_cases import install, modules
from tests.fixtures.fake_tpus import FINDS_EIGHT, NO_PLATFORM, TENSORFLOW, VARIABLES, compiled_libtpu, needs_compiler
from tests.fixtures.fresh_process import answers_of
from tests.fixtures.tiny_classification import flags
from tests.fixtures.tiny_run import run_flags
from train.config.hardware import HardwareConfig
from train.runtime import machines, pjrt_settings
from train.runtime.child_process import ChildFailedError
from train.runtime.machines import is_newer_tpu, tpu_devices

LOCAL = HardwareConfig(tpu_name="local")


@pytest.fixture
def libtpu(tmp_path, monkeypatch) -> Path:
    """A file that stands for libtpu, beside a TensorFlow for TPUs that is not imported yet."""
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    monkeypatch.setattr(pjrt_settings, "has_tensorflow_for_tpus", lambda: True)
    monkeypatch.setattr(pjrt_settings, "_tried", [])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    return library


@pytest.mark.parametrize(
    ("devices", "pci", "variables", "is_newer"),
    [
        ("", "", {"TPU_ACCELERATOR_TYPE": "v5e-8"}, False),  # a laptop on which someone asks for a v5e
        ("nvidia0 vfio/vfio", "0x10de:0x2330", {}, False),
        ("vfio/0", "", {}, True),
        ("accel0", "0x8086:0x1237 0x1ae0:0x0063", {}, True),
        ("vfio/0", "0x1ae0:0x005e", {}, False),
        ("vfio/0", "0x10de:0x005e", {}, True),  # of another maker
        ("accel0", "0x1ae0:0x0027", {}, False),
        ("vfio/0", "0x1ae0:0x006f", {}, True),
        ("accel0", "", {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, True),
        ("vfio/0", "", {"TPU_ACCELERATOR_TYPE": "v4-8"}, False),
    ],
)
def test_which_tpus_need_pjrt(devices, pci, variables, is_newer, tpu_machine):
    tpu_machine(devices, pci, **variables)
    assert is_newer_tpu() is is_newer


@pytest.mark.usefixtures("libtpu")
def test_a_machine_without_a_tpu_asks_nobody(tpu_machine, monkeypatch):
    """Neither the metadata server, for which a laptop would wait, nor TensorFlow, which would die."""

    def fail(*_, **__):
        raise AssertionError("asked")

    tpu_machine("", TPU_ACCELERATOR_TYPE="v5e-8")
    monkeypatch.delenv(pjrt_settings.NO_METADATA_VARIABLE)
    monkeypatch.setattr(pjrt_settings, "read_metadata", fail)
    monkeypatch.setattr(machines, "read_metadata", fail)
    monkeypatch.setattr(pjrt_settings, "ask_module", fail)
    for pjrt in ("auto", "on"):
        pjrt_settings.show_tpu(HardwareConfig(tpu_name="local", pjrt=pjrt))
    assert not tpu_devices()
    assert not set(VARIABLES) & set(os.environ)


def test_a_trial_that_finds_the_tpu_is_followed(tpu_machine, libtpu, tmp_path, monkeypatch, caplog):
    """In the trial the settings are there; the user's own values stay."""
    tpu_machine(
        "vfio/0", TPU_LIBRARY_PATH=str(libtpu), TF_XLA_FLAGS="--tf_mlir_enable_mlir_bridge=false", PJRT_DEVICE="MY"
    )
    monkeypatch.delenv(pjrt_settings.NO_METADATA_VARIABLE)
    seen = f"assert os.environ['{pjrt_settings.LIBRARY_VARIABLE}'] == {str(libtpu)!r}; {FINDS_EIGHT}"
    modules(tmp_path, monkeypatch, tensorflow____init__=TENSORFLOW.format(seen))
    with caplog.at_level(logging.INFO):
        pjrt_settings.show_tpu(LOCAL)
    assert "with them it found 8 TPU cores" in caplog.text
    own, _, added = os.environ["TF_XLA_FLAGS"].partition(" ")
    assert (own, added) == ("--tf_mlir_enable_mlir_bridge=false", " ".join(pjrt_settings.XLA_FLAGS[1:]))
    assert [os.environ[name] for name in VARIABLES[:3]] == ["MY", "true", str(libtpu)]
    assert os.environ[pjrt_settings.NO_METADATA_VARIABLE] == "1"  # as no server answered
    assert pjrt_settings.describe_attempts().endswith(", with its PJRT settings.")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV): it printed no message."),
        (NO_PLATFORM, "failed: RuntimeError: No TPU platform found. Platform manager status: OK"),
        ("time.sleep(600)", "did not end within 2 s."),
        (None, "found no libtpu.so: the package libtpu is not installed."),
    ],
    ids=["dies", "finds none", "hangs", "no libtpu"],
)
def test_a_trial_that_fails_is_one_line(program, reason, tpu_machine, libtpu, tmp_path, monkeypatch, caplog):
    tpu_machine("vfio/0", TPU_LIBRARY_PATH=str(libtpu))
    monkeypatch.setattr(pjrt_settings, "TRIAL_SECONDS", 2.0 if "sleep" in str(program) else 60.0)
    modules(tmp_path, monkeypatch, tensorflow____init__=TENSORFLOW.format(program))
    if program is None:
        libtpu.unlink()
        monkeypatch.setattr(pjrt_settings.importlib.util, "find_spec", lambda _: None)
    pjrt_settings.show_tpu(LOCAL)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == f"TensorFlow's PJRT settings are not used: a trial with them {reason}"
    assert not set(VARIABLES) & set(os.environ)
    tried = pjrt_settings.describe_attempts()
    assert tried.endswith(f"with its PJRT settings, where a trial {reason}, then without them.")
    if "sleep" in str(program):
        return
    with pytest.raises(RunFailedError, match=r"--pjrt on needs a TPU that TensorFlow finds.*--runtime jax"):
        pjrt_settings.show_tpu(HardwareConfig(tpu_name="local", pjrt="on"))


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (HardwareConfig(tpu_name="local", pjrt="off"), "vfio/0"),
        (LOCAL, "accel0"),
        (HardwareConfig(tpu_name="local", no_tpu=True), "vfio/0"),
        (HardwareConfig(), "vfio/0"),
    ],
)
def test_what_needs_no_settings_has_no_trial(config, devices, tpu_machine, monkeypatch):
    tpu_machine(devices)
    monkeypatch.setattr(pjrt_settings, "try_to_connect", None)
    pjrt_settings.show_tpu(config)
    assert not set(VARIABLES) & set(os.environ)


def test_pjrt_on_is_tried_on_an_older_tpu(tpu_machine, libtpu, monkeypatch):
    tpu_machine("accel0", TPU_LIBRARY_PATH=str(libtpu))
    monkeypatch.setattr(pjrt_settings, "try_to_connect", lambda **_: 8)
    pjrt_settings.show_tpu(HardwareConfig(tpu_name="local", pjrt="on"))
    assert set(VARIABLES) <= set(os.environ)


SHOWN = """
import train.loop.lifecycle as lifecycle
from mlm_common.errors import InputError
def show_tpu(hardware):
    raise InputError(f"--pjrt {hardware.pjrt}")
lifecycle.show_tpu, lifecycle.check_tpu_devices = show_tpu, lambda hardware: None
import train.score_mlm
train.score_mlm.show_tpu = show_tpu
"""


@pytest.mark.slow
def test_a_run_sets_them_before_it_imports_tensorflow(shards, tiny_start, tmp_path):
    tpu_flags = ("--tpu-name", "local", "--pjrt", "off")
    pretraining = ("train.run_mlm", run_flags(shards, tmp_path / "run", *tpu_flags))
    finetuning = ("finetuning.run_classification", flags(tiny_start, tmp_path / "tuned", *tpu_flags))
    (tmp_path / "text.txt").write_text("a house\n", encoding="utf-8")
    scored = ("--model", str(tiny_start / "start"), "--text", str(tmp_path / "text.txt"), "--tpu-name", "local")
    answers = answers_of([pretraining, finetuning, ("train.score_mlm", scored)], SHOWN)
    for answer, pjrt in zip(answers, ("off", "off", "auto"), strict=True):
        assert answer.err.strip().endswith(f"error: --pjrt {pjrt}")
        assert not answer.has_tensorflow


@needs_compiler
def test_the_pjrt_api_of_a_libtpu_is_read_from_it(tmp_path):
    assert pjrt_settings.library_api_version(compiled_libtpu(tmp_path, 73)) == "0.73"
    with pytest.raises(ChildFailedError, match=r"failed: AttributeError: .*undefined symbol: GetPjrtApi"):
        pjrt_settings.library_api_version(compiled_libtpu(tmp_path, 73, "Other"))


def test_the_pjrt_api_of_tensorflow_is_read_from_its_headers(tmp_path, monkeypatch):
    version = pjrt_settings.tensorflow_api_version()
    assert version
    assert int(version.partition(".")[2]) >= 72
    install(tmp_path, "tensorflow", "2.20")
    spec = type("Spec", (), {"origin": str(tmp_path / "tensorflow" / "__init__.py")})
    monkeypatch.setattr(pjrt_settings.importlib.util, "find_spec", lambda _: spec)
    assert pjrt_settings.tensorflow_api_version() is None
