"""Stage 3, the training. Its chapters in reading order, each of which imports only from those before it:

    run_mlm.py      the command, which reads as a table of contents: what is done, one call a line
    config/         all settings of a run, and where they come from
    runtime/        what a run runs on: plan, strategy, devices, workers, hooks between steps, and how it stops
    data/           shards to batches: opened and checked, shuffled by arithmetic, read as tf.data
    layers/         what layers are made of: random bits, dropout, attention and products as suits the TPU
    model/          the model: configuration, presets, architectures, weights to start from
    tasks/          what is learned: masked tokens, pairs of segments; their masks and losses
    step/           masks, forward, backward, accumulation, clipping; AdamW and LAMB, the learning rate; evaluation
    checkpoints/    written by a thread, checked when read, and the rules of resuming from them
    metrics/        what is measured: log, pictures, evaluation, throughput, profiles
    publishing/     the export in PyTorch layout, the model card, and pushes to the Hub
    loop/           all of these put together: a run checked, planned and recorded; what is done at which step
    checks/         what is checked before a TPU is paid for, for the commands doctor.py and tpu_preflight.py

The other commands are export.py, fill_mask.py, compare_runs.py and convert_bert.py.

This module prepares the environment for TensorFlow and transformers, which read it when they are first imported. Import
it before `tensorflow`, `tf_keras` and transformers' TF classes. It imports none of them itself.
"""

import importlib.util
import logging
import os
import sys
from pathlib import Path

from mlm_common.cli.library_noise import hide_noise_of_tensorflow
from mlm_common.errors import InputError

IMPORT_UTILS = "transformers.utils.import_utils"
# In /dev: NVIDIA's GPUs, those of WSL and AMD, TPUs of either kind.
ACCELERATORS = ("nvidia*", "dxg", "kfd", "accel*", "vfio/[0-9]*")
# What transformers says of every TF model, by the modules that do.
TOLD_OF_EVERY_MODEL = ("TensorFlow and JAX classes are deprecated", "Device set to use")
TELLING = ("modeling_tf_utils", "pipelines.base", "tokenization_utils_base")


def prepare_environment() -> None:
    """Set the variables that make transformers' TF classes work with the TensorFlow installed.

    Raises:
        InputError: transformers was imported before, and took this TensorFlow for missing.
    """
    # transformers' TF classes are Keras 2 classes.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    # Where there is but a CPU, the libraries' errors tell of the GPU that is not there: `failed call to cuInit`.
    has_accelerator = any(any(Path("/dev").glob(pattern)) for pattern in ACCELERATORS)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if has_accelerator else "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    hide_noise_of_tensorflow()
    for module in TELLING:
        logging.getLogger(f"transformers.{module}").addFilter(_is_worth_telling)
    if importlib.util.find_spec("tensorflow") is None:
        return
    # transformers looks for a distribution of a name it knows, and `tensorflow-tpu` is none of them.
    os.environ["FORCE_TF_AVAILABLE"] = "1"
    import_utils = sys.modules.get(IMPORT_UTILS)
    if import_utils is not None and not import_utils.is_tf_available():
        raise InputError(
            "train must be imported before transformers; transformers was imported first and does not see "
            "the TensorFlow installed. Import train first, or set FORCE_TF_AVAILABLE=1."
        )


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(TOLD_OF_EVERY_MODEL)


prepare_environment()
