"""What a run is made of: shards, tokenizer, model, output folder, the Hub; by the checks that the run itself makes."""

import functools
from collections.abc import Iterator

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from mlm_common.tokenizer import vocabulary_size
from tfrecord_prep.records import first_row_ids
from train.checkpoints.store import CheckpointStore, DamagedCheckpointError, newest_record
from train.checks.doctor.findings import Finding, error, ok, warning
from train.checks.doctor.libraries import IMPORT_SECONDS, ProcessFailedError, ask_tensorflow
from train.checks.doctor.machine import check_disk, check_memory
from train.config.settings import DataConfig, TrainingConfig
from train.data.shards import TrainingInputs, open_inputs
from train.loop.run import check_can_push, newest_phase, open_run
from train.runtime.cluster import read_cluster
from train.runtime.phases import naming_phase, phases_of
from train.runtime.run_folder import (
    CHECKPOINTS_FOLDER,
    EXPORT_FOLDER,
    RECORD_NAME,
    check_run_folder,
    read_run_record,
)
from train.runtime.tpu import expected_num_replicas
from train.tasks.objectives import task_of


@functools.cache
def inputs_of(config: DataConfig) -> TrainingInputs:
    """Open the inputs, once for all checks."""
    return open_inputs(config)


def check_data(config: TrainingConfig) -> Iterator[Finding]:
    """Check that shards are complete, have rows of one length, and were made with the tokenizer."""
    for phase in phases_of(config):
        with naming_phase(phase.name):
            yield from _check_data(phase.config)


def _check_data(config: TrainingConfig) -> Iterator[Finding]:
    inputs = inputs_of(config.data)
    task_of(config, inputs)
    for flag, shards in (("--train-dataset", inputs.train_shards), ("--eval-dataset", inputs.eval_shards)):
        if shards is None:
            continue
        largest_id, num_ids = first_row_ids(shards.paths[0]).max(), vocabulary_size(inputs.tokenizer)
        if largest_id >= num_ids:
            text = f"the first row of {shards.folder} has the id {largest_id}; the tokenizer has {num_ids}."
            yield error("data", text, "Name the tokenizer that the shards were made with: --tokenizer.")
        else:
            made = "" if shards.manifest else ", without a manifest, so only by its first row"
            text = f"{flag} {shards.folder}: {shards.num_rows:,} rows of {inputs.max_length} tokens"
            yield ok("data", f"{text}, fit the tokenizer {inputs.tokenizer_source}{made}")
    if not open_folder(inputs.train_shards.folder).is_local:
        ask_tensorflow("read_shard", config, IMPORT_SECONDS)
        yield ok("data", "TensorFlow can read the shards with its own credentials")


def check_run(config: TrainingConfig) -> Iterator[Finding]:
    """Check the model, the plan and the output folder as a run does, and that it fits disk and memory."""
    try:
        for phase in phases_of(config):
            inputs_of(phase.config.data)
    except (InputError, OSError):
        return  # check_data says why
    run = open_run(config, read_cluster())
    run.plan(expected_num_replicas(config.hardware, run.cluster, num_local_devices=1))
    longest = max(run.phases, key=lambda phase: phase.inputs.max_length).config
    assert isinstance(longest, TrainingConfig)
    config = longest
    if config.run.output_dir is not None:
        check_run_folder(
            run.output_dir,
            run.fingerprint,
            resume=config.run.resume,
            overwrite=config.run.overwrite_output_dir,
            begun_phase=newest_phase(run),
        )
        open_folder(run.output_dir).check_writable()
        yield ok("output", f"{run.output_dir} is writable and contains no other run")
    try:
        counts = ask_tensorflow("count_parameters", config, IMPORT_SECONDS)
    except ProcessFailedError as failed:
        fix = "Fix the errors above first; if there are none, this machine may have too little memory for the model."
        yield error("model", f"building the model {failed}", fix)
        return
    run.plan(expected_num_replicas(config.hardware, run.cluster, counts["num_local_devices"]))
    num_parameters = counts["num_parameters"]
    yield ok("model", f"{run.model_config.model_type}, {num_parameters:,} parameters")
    yield from check_disk(config, num_parameters)
    yield from check_memory(config, num_parameters)


def check_folder(config: TrainingConfig) -> Iterator[Finding]:
    """Check which run the folder contains, of pretraining or fine-tuning, and that its newest checkpoint is intact."""
    folder = str(config.run.output_dir)
    if not open_folder(folder).exists(RECORD_NAME):
        return
    run, newest = read_run_record(folder), newest_record(folder)
    task = run.get("task", {}).get("card", {}).get("task_name", "masked language modeling")
    if newest is None:
        yield ok("run", f"{folder} contains a run ({task}) without a checkpoint")
        return
    store = CheckpointStore(open_folder(folder).subfolder(CHECKPOINTS_FOLDER))
    try:
        store.read_arrays(newest)
    except DamagedCheckpointError as damage:
        text = f"the newest checkpoint of {folder}, {store.path(newest.step)}, is damaged: {damage}."
        yield warning("run", text, "A run resumes from the one before it, if there is one.")
        return
    exported = "exported" if open_folder(folder).subfolder(EXPORT_FOLDER).exists("config.json") else "not exported yet"
    steps = f"saved after step {newest.step:,} of {newest.plan['num_steps']:,}, intact, {exported}"
    yield ok("run", f"{folder} contains a run ({task}), {steps}")


def check_hub(config: TrainingConfig) -> Iterator[Finding]:
    """Check that the token may write to the repository that the run pushes to."""
    repository = config.hub.repository()
    if repository is not None:
        check_can_push(config.hub)
        yield ok("Hub", f"the token may write to {repository.repo_id}")
