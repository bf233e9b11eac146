"""Stage 3: training. Read `run_mlm.py` and `train.loop.lifecycle` first; they take a run from its flags to its export.

The folders in reading order; each folder imports only from the folders above it:

    config/         all settings of a run, and where they come from
    runtime/        the run's folder, plan, machines, strategy, hooks between steps, and how it stops
    data/           opening and checking shards, a stateless shuffle, tf.data
    layers/         random bits, dropout, attention and matrix products that suit the TPU
    model/          configuration, architectures, weights to start from
    tasks/          pretraining objectives: masked tokens, pairs of segments; their masks and losses
    step/           forward, backward, accumulation, clipping; optimizers, the learning rate; evaluation
    checkpoints/    writing in a thread, checking on read; the identity of a run, and where it resumes
    metrics/        log, plots, throughput, progress bar
    publishing/     the export in PyTorch layout, the model card, pushes to the Hub
    scoring/        scores without fine-tuning: bits per byte, words, minimal pairs
    loop/           a run and its phases, its life from check to export, and hooks between steps
    checks/         checks before you pay for a TPU, used by doctor.py and tpu_preflight.py

The other commands are export.py, fill_mask.py, score_mlm.py, compare_runs.py and convert_bert.py.

This module sets environment variables that TensorFlow and transformers read on their first import. Import this module
before `tensorflow`, `tf_keras` and transformers' TF classes. This module does not import them until `load_tensorflow`
is called.
"""

import ctypes
import importlib.util
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm_common.cli.process import check_interrupts, repeat_notice

logger = logging.getLogger(__name__)

# Device files in /dev: TPUs (two drivers), NVIDIA GPUs, GPUs under WSL, and AMD GPUs.
TPUS = ("accel*", "vfio/[0-9]*")
ACCELERATORS = ("nvidia*", "dxg", "kfd", *TPUS)
# glibc's M_ARENA_MAX, M_MMAP_THRESHOLD (twice) and M_TOP_PAD: use a single heap that keeps up to 1 GiB of freed memory.
# Older versions reject a threshold above 32 MiB, so 32 MiB is set first. If no threshold were set, M_TOP_PAD would fix
# it at 128 KiB.
MALLOC_OPTIONS = ((-8, 1), (-3, 2**25), (-3, 2**30), (-2, 2**30))
# Whether TensorFlow computes with oneDNN. By default it does so only on x86 CPUs with instructions for neural networks,
# such as AVX512_VNNI. On an AMD EPYC with only AVX2, oneDNN makes a step of the quick start's model 1.14 times as fast.
ONEDNN_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
X86 = ("x86_64", "AMD64")
# TensorFlow and Keras import these packages if installed. The imports take a second, and are not needed.
OPTIONAL_PACKAGES = ("fsspec", "jax", "pandas", "scipy")


def prepare_environment() -> None:
    """Set the environment variables that TensorFlow and transformers read on their first import."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # the TensorFlow classes of transformers 4 are Keras 2 classes
    if importlib.util.find_spec("tensorflow"):
        os.environ["FORCE_TF_AVAILABLE"] = "1"  # transformers 4 does not recognize TensorFlow as `tensorflow-tpu`
    # On a machine with only a CPU, the libraries log errors about a missing GPU: `failed call to cuInit`.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if has_accelerator() else "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if not has_accelerator(TPUS):
        # Otherwise TensorFlow for TPUs polls a metadata server for minutes during its import, and exits if it finds
        # none.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if not has_accelerator():
        keep_freed_memory()


def load_tensorflow() -> None:
    """Import TensorFlow, fast and quietly, before other modules import it.

    If it cannot be imported, do nothing: the modules that need it raise the error.
    """
    if "tensorflow" in sys.modules:
        return
    logger.info("Loading TensorFlow …")
    sets_onednn = platform.machine() in X86 and not has_accelerator() and ONEDNN_VARIABLE not in os.environ
    if sets_onednn:
        os.environ[ONEDNN_VARIABLE] = "1"
    absent = [name for name in OPTIONAL_PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type] # imports of these packages fail
    try:
        with suppress(ImportError), _silent_libraries():
            import tensorflow  # noqa: F401
    finally:
        for name in absent:
            sys.modules.pop(name, None)
        if sets_onednn:  # TensorFlow has read it; child processes decide for themselves, such as a run with JAX
            del os.environ[ONEDNN_VARIABLE]
    check_interrupts()  # an optional import may have caught the KeyboardInterrupt and counted as failed


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Discard output of C++ code to standard error, unless TF_CPP_MIN_LOG_LEVEL is 0, as it is with `--verbose`.

    No environment variable hides the lines that TensorFlow's libraries print while they are loaded.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
        repeat_notice()


def keep_freed_memory() -> None:
    """Let each step on a CPU reuse the memory that the previous step freed.

    New memory is slower, because Linux clears its pages first.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter, value in MALLOC_OPTIONS:
            mallopt(parameter, value)


def has_accelerator(patterns: tuple[str, ...] = ACCELERATORS) -> bool:
    return any(any(Path("/dev").glob(pattern)) for pattern in patterns)


def has_bfloat16_instructions() -> bool:
    """Return whether this machine's CPU multiplies in bfloat16, according to Linux; False on other systems."""
    path = Path("/proc/cpuinfo")
    return path.exists() and bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", path.read_text(encoding="utf-8")))


def multiplies_in_bfloat16() -> bool:
    """Return whether a run here can multiply in bfloat16 without XLA.

    False on a GPU: there TensorFlow would also sum the gradients of biases in bfloat16, and most terms of these sums
    would be lost.
    """
    return has_bfloat16_instructions() and not has_accelerator()


prepare_environment()
