"""Checks of a run: its shards, then all that `run_mlm.py --dry-run` checks, the run in its folder, and the Hub."""

from collections.abc import Iterator

from mlm_common.storage import open_folder
from train.checkpoints.store import CheckpointStore, DamagedCheckpointError, newest_record
from train.checks.doctor.findings import Finding, error, ok, warning
from train.checks.doctor.libraries import IMPORT_SECONDS, ProcessFailedError, ask_tensorflow
from train.checks.doctor.machine import check_disk, check_memory
from train.config.settings import TrainingConfig
from train.data.shards import open_inputs
from train.loop.run import check_can_push
from train.runtime.phases import naming_phase, phases_of
from train.runtime.run_folder import CHECKPOINTS_FOLDER, EXPORT_FOLDER, RECORD_NAME, read_run_record


def check_data(config: TrainingConfig) -> Iterator[Finding]:
    """Check that shards are complete, have rows of one length, and were made with the tokenizer."""
    for phase in phases_of(config):
        with naming_phase(phase.name):
            inputs = open_inputs(phase.config.data)
        for flag, shards in (("--train-dataset", inputs.train_shards), ("--eval-dataset", inputs.eval_shards)):
            if shards is not None:
                text = f"{flag} {shards.folder}: {shards.num_rows:,} rows of {inputs.max_length} tokens"
                yield ok("data", f"{text}, fit the tokenizer {inputs.tokenizer_source}")


def check_run(config: TrainingConfig) -> Iterator[Finding]:
    """Check what `run_mlm.py --dry-run` checks, and that the run fits disk and memory."""
    try:
        answer = ask_tensorflow("check_run", config, IMPORT_SECONDS)
    except ProcessFailedError as failed:
        fix = "This machine may have too little memory for the model."
        yield error("run", f"preparing the run {failed}", fix)
        return
    yield ok("run", answer["summary"])
    yield from check_disk(config, answer["num_parameters"])
    yield from check_memory(config, answer["num_parameters"])


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
