"""The doctor's checks that import TensorFlow, in a separate process: it may crash, hang, or claim the TPU.

    python -m train.checks.doctor.tensorflow_process TASK

reads a pickled `TrainingConfig` on standard input, and prints a JSON object as the last line.
"""

import importlib.util
import json
import pickle
import sys
from dataclasses import replace
from typing import Any

from mlm_common.errors import InputError, RunFailedError
from train.config.settings import TrainingConfig


def import_libraries(_config: TrainingConfig) -> dict[str, Any]:
    """Import what a run imports, and return versions; looking for devices might claim a TPU."""
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
    from train.runtime.machines import Cluster
    from train.runtime.strategy import connect

    return {"num_replicas": connect(config.hardware, Cluster()).num_replicas_in_sync}


def check_run(config: TrainingConfig) -> dict[str, Any]:
    """Make the checks of `run_mlm.py --dry-run`, read a shard with TensorFlow's client, and build the model."""
    import tensorflow as tf

    from mlm_common.tokenizer import vocabulary_size
    from train.data.shards import TrainingInputs
    from train.loop.lifecycle import Pretraining, prepare
    from train.model.build import build_network
    from train.runtime.machines import expected_num_replicas, read_cluster
    from train.runtime.strategy import local_devices

    config = replace(config, run=replace(config.run, dry_run=True))
    job = Pretraining()
    run = prepare(config, job) if config.run.output_dir else job.open_run(config, read_cluster())
    first = run.phases[0]
    plan = run.plans(expected_num_replicas(config.hardware, run.cluster, len(local_devices())))[-1]
    for phase in run.phases:
        assert isinstance(phase.inputs, TrainingInputs)
        _read_shard(phase.inputs.train_shards.paths[0])
    with tf.device("CPU:0"):
        network = build_network(
            first.model_config,
            config.model,
            vocabulary_size=vocabulary_size(first.inputs.tokenizer),
            seed=config.run.seed,
            model_class=first.task.model_class,
        )
    num_parameters = network.count_params()
    output = f"; {run.folder} is writable and contains no other run" if config.run.output_dir else ""
    summary = f"{first.model_config.model_type}, {num_parameters:,} parameters, {plan.num_steps:,} steps{output}"
    return {"num_parameters": num_parameters, "summary": summary}


def _read_shard(path: str) -> None:
    """Read from a shard with TensorFlow's own client, which finds credentials in its own way."""
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            file.read(1)
    except tf.errors.OpError as error:
        raise InputError(
            f"TensorFlow must be able to read the shards; {path} gave {type(error).__name__}: {error.message[:200]} It "
            "uses no account where it finds no credentials: run `gcloud auth application-default login`, or name a "
            "service account's key by GOOGLE_APPLICATION_CREDENTIALS; on a TPU VM give its account access."
        ) from error


TASKS = {task.__name__: task for task in (import_libraries, list_gpus, connect_tpu, check_run)}


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
