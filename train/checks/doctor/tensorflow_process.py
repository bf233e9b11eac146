"""What the doctor asks of TensorFlow, in a process of its own, which may crash, hang, or claim the TPU.

    python -m train.checks.doctor.tensorflow_process TASK

reads a pickled `TrainingConfig` on standard input, and prints a JSON object as the last line.
"""

import importlib.util
import json
import pickle
import sys
from typing import Any

from mlm_common.errors import InputError, RunFailedError
from train.config.settings import TrainingConfig  # so train comes before TensorFlow, as it must


def import_libraries(_config: TrainingConfig) -> dict[str, Any]:
    """Import what a run imports, and return what it is; no device is looked for, which might claim a TPU."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is not None and spec.origin is None:
        raise ImportError(f"only remains of a TensorFlow that was uninstalled: {spec.submodule_search_locations}")

    import tensorflow as tf
    import tf_keras  # noqa: F401
    import transformers.modeling_tf_utils

    return {
        "tensorflow": tf.__version__,
        "file": str(spec and spec.origin),
        "is_seen_by_transformers": transformers.utils.is_tf_available(),
    }


def list_gpus(_config: TrainingConfig) -> dict[str, Any]:
    """List the GPUs that TensorFlow sees."""
    import tensorflow as tf

    return {"gpus": [device.name for device in tf.config.list_physical_devices("GPU")]}


def connect_tpu(config: TrainingConfig) -> dict[str, Any]:
    """Claim the TPU as a run does, for as long as this process lives."""
    from train.runtime.cluster import Cluster
    from train.runtime.strategy import connect

    return {"num_replicas": connect(config.hardware, Cluster()).num_replicas_in_sync}


def read_shard(config: TrainingConfig) -> dict[str, Any]:
    """Read of a shard with TensorFlow's own client, which finds credentials in its own way."""
    import tensorflow as tf

    from train.data.shards import open_inputs

    path = open_inputs(config.data).train_shards.paths[0]
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return {"num_bytes": len(file.read(1))}
    except tf.errors.OpError as error:
        raise InputError(
            f"TensorFlow must be able to read the shards; {path} gave {type(error).__name__}: {error.message[:200]} It "
            "asks without a name where it finds no credentials: run `gcloud auth application-default login`, or name a "
            "service account's key by GOOGLE_APPLICATION_CREDENTIALS; on a TPU VM give its account access."
        ) from error


def count_parameters(config: TrainingConfig) -> dict[str, Any]:
    """Build the model on the CPU, and count the devices that would train it."""
    import tensorflow as tf

    from mlm_common.tokenizer import vocabulary_size
    from train.data.shards import open_inputs
    from train.model.build import build_network
    from train.model.config import resolve_model_config
    from train.runtime.strategy import local_devices

    inputs = open_inputs(config.data)
    with tf.device("CPU:0"):
        network = build_network(
            resolve_model_config(config.model, inputs),
            config.model,
            vocabulary_size=vocabulary_size(inputs.tokenizer),
            seed=config.run.seed,
        )
    return {"num_parameters": network.count_params(), "num_local_devices": len(local_devices())}


TASKS = {task.__name__: task for task in (import_libraries, list_gpus, connect_tpu, read_shard, count_parameters)}


def main() -> None:
    """Do the task that the command line names."""
    config = pickle.load(sys.stdin.buffer)
    try:
        result = TASKS[sys.argv[1]](config)
    except (InputError, RunFailedError) as error:
        result = {"refused": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
