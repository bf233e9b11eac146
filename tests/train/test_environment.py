import os
import platform
import resource
import subprocess
import sys

import pytest

from tests.fixtures.tiny_models import of_transformers_4
from train import ONEDNN_VARIABLE, TPUS, X86, has_accelerator


def run_program(program: str, *left_out: str) -> subprocess.CompletedProcess:
    """Run a program without some variables of the environment."""
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)


@of_transformers_4
def test_an_environment_prepared_too_late_is_refused():
    # transformers does not know the distribution of this TensorFlow, as it does not know `tensorflow-tpu`.
    program = """
import importlib.metadata as metadata
known = metadata.version
def version(name):
    if name.startswith(("tensorflow", "tf-nightly", "intel-tensorflow")):
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
{first}
{second}
from tests.fixtures.tiny_models import tiny_config
from train.model.architectures import check_computable
check_computable(tiny_config("mpnet"))
"""
    orders = (("import train", "import transformers"), ("import transformers", "import train"))
    well, refused = (
        run_program(program.format(first=first, second=second), "FORCE_TF_AVAILABLE") for first, second in orders
    )
    assert well.returncode == 0
    assert "InputError: model_type mpnet needs the TensorFlow classes of transformers, which was" in refused.stderr


@pytest.mark.skipif(has_accelerator(TPUS), reason="for a machine without a TPU")
def test_libtpu_asks_no_metadata_server_where_there_is_no_tpu():
    program = "import os, train; print(os.environ['TPU_SKIP_MDS_QUERY'])"
    assert run_program(program, "TPU_SKIP_MDS_QUERY").stdout.split() == ["1"]


@pytest.mark.skipif(platform.machine() not in X86 or has_accelerator(), reason="for x86, and only a CPU")
def test_tensorflow_computes_with_onednn_unless_the_user_says_otherwise(monkeypatch):
    program = """
import os
import train
train.load_tensorflow()
from tensorflow.python.util import _pywrap_util_port
print(_pywrap_util_port.IsMklEnabled(), VARIABLE in os.environ)
""".replace("VARIABLE", repr(ONEDNN_VARIABLE))
    shown = [run_program(program, ONEDNN_VARIABLE).stdout]
    monkeypatch.setenv(ONEDNN_VARIABLE, "0")
    shown.append(run_program(program).stdout)
    assert shown == ["True False\n", "False True\n"]


@pytest.mark.slow
def test_the_libraries_print_no_error_or_warning():
    program = """
import train
import tensorflow as tf
import transformers
from tests.fixtures.tiny_models import HAS_TF_CLASSES, tiny_model, tiny_tokenizer
from train.fill_mask import _fill
tf.config.list_logical_devices()
model = tiny_model("mpnet" if HAS_TF_CLASSES else "bert")
_fill(model, tiny_tokenizer(), "a [MASK]", 1)
"""
    done = run_program(program, "TF_CPP_MIN_LOG_LEVEL")
    assert done.returncode == 0
    # Information (`I`) of TensorFlow's libraries, and what its first lines begin with, cannot be turned off.
    unavoidable = ("I0000", "WARNING: All log messages before")
    assert not [line for line in done.stderr.splitlines() if not line.startswith(unavoidable)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or has_accelerator(), reason="for glibc, and only a CPU")
def test_memory_that_was_freed_is_used_again_without_new_pages():
    """In a fresh process: elsewhere other memory may be free, too, and be taken first."""
    program = """
import resource
import train
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes_of_a_step = b"x" * 2**24  # every glibc allows a threshold above it
    del bytes_of_a_step
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults[1:])
"""
    num_pages, faults = 2**24 // resource.getpagesize(), run_program(program).stdout.split()
    assert len(faults) == 2
    assert all(int(num_faults) < num_pages // 10 for num_faults in faults), faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or has_accelerator(), reason="for glibc, and only a CPU")
def test_memory_is_kept_although_tensorflow_forbids_it_with_its_first_iterator():
    """What malloc takes from Linux by itself, it gives back as soon as it is freed. Only its heap is kept."""
    program = """
import ctypes
import train
train.load_tensorflow()
import tensorflow as tf
from train.runtime.tensorflow_runtime import TensorFlowRuntime

class Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("heap", "chunks", "small", "taken_by_itself", *"abcdef")]

libc = ctypes.CDLL(None)
libc.mallinfo.restype, libc.malloc.argtypes = Statistics, [ctypes.c_size_t]
libc.malloc.restype = ctypes.c_void_p
runtime = TensorFlowRuntime(tf.distribute.OneDeviceStrategy("/cpu:0"))
for _ in range(2):
    next(iter(runtime.distribute(lambda _: tf.data.Dataset.range(8).batch(2).repeat())))
    before = libc.mallinfo().taken_by_itself
    for _ in range(96):  # together more than the heap has left
        libc.malloc(2**24)
    print(libc.mallinfo().taken_by_itself - before)
"""
    assert run_program(program).stdout.split() == ["0", "0"]
