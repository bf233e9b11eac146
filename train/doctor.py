r"""Check the installation, the machine and everything that a run will need, before the run costs hours.

Accepts all flags of run_mlm.py: run the same command line with doctor.py instead. Without flags it checks the
installation and the machine. With --output-dir alone it also checks the run in that folder, from pretraining or
fine-tuning. Each line starts with ok, warning or error; warnings and errors say how to fix them. The exit status is 1
after an error, 2 for bad flags.

Examples:
    python train/doctor.py
    python train/doctor.py --output-dir work/model
    python train/doctor.py --tpu-name local --preset roberta-base-v5e-8 \
        --train-dataset gs://my-bucket/shards/train --output-dir gs://my-bucket/model
"""

try:
    from mlm_common.cli.command_line import command
    from mlm_common.errors import InputError, RunFailedError
    from mlm_common.storage import Folder, open_folder
    from mlm_common.storage.folder import GCS_PREFIX, bucket_and_name
    from train.checks import machine, platforms
    from train.checks.machine import Finding, ask_tensorflow, findings_of
    from train.config.phases import phases_of
    from train.config.settings import TrainingConfig, parse_run_flags
    from train.runtime.machines import read_metadata
    from train.runtime.plan import FLOAT32_BYTES, num_in_checkpoint
    from train.runtime.run_folder import RunFolder
except ModuleNotFoundError as missing:
    print(
        f"error    Python         {missing}. Activate the project's environment (source .venv/bin/activate) or create "
        "it: python3 install.py"
    )
    raise SystemExit(1) from None
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from mlm_common.cli.console import counted
from mlm_common.cli.process import run_as_script

INSTALLATION = (
    ("Python", machine.check_python),
    ("packages", machine.check_requirements),
    ("TensorFlow", machine.check_tensorflow_build),
    ("tf-keras", machine.check_tf_keras),
)
MACHINE = (
    ("import", machine.check_import),
    ("GPU", machine.check_gpus),
    ("runtime", platforms.check_runtime),
    ("environment", platforms.check_tpu_variables),
    ("PJRT", platforms.check_pjrt),
    ("TPU", machine.check_tpu),
    ("devices", platforms.check_platforms),
)


@command
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_run_flags(argv, __doc__)
    print_all(all_findings(config))
    if not _has_run(config):
        print("To also check a run's shards, buckets, model and Hub repository, pass the run's flags of run_mlm.py.")


def _has_run(config: TrainingConfig) -> bool:
    return bool(config.data.train_dataset or config.run.phases)


def all_findings(config: TrainingConfig) -> Iterator[Finding]:
    has_errors = False
    installed = machine.installed_packages()
    on_packages = (findings_of(subject, check, installed) for subject, check in INSTALLATION)
    on_machine = (findings_of(subject, check, config) for subject, check in MACHINE)
    on_services = (findings_of("bucket", check_buckets, config), findings_of("Hub", check_hub, config))
    for finding in chain(*on_packages, *on_machine, *on_services):
        # A TPU that is missing on this machine does not prevent checks of the run.
        has_errors |= finding.status == "error" and finding.subject != "TPU"
        yield finding
    if not _has_run(config):
        yield from findings_of("run", check_folder, config)
    elif has_errors:
        yield Finding("warning", "run", "was not checked: fix the errors above first.")
    else:
        yield from findings_of("run", check_run, config)


def cloud_folders(config: TrainingConfig) -> dict[str, Folder]:
    """Return the run's folders in Cloud Storage, by the flag (and phase) that names them."""
    paths: dict[str, str | None] = {}
    for phase in phases_of(config):
        suffix = f" of phase `{phase.name}`" if phase.name else ""
        paths |= {f"{flag}{suffix}": path for flag, path in phase.config.data.folders().items()}
    paths["--output-dir"] = config.run.output_dir
    folders = {flag: open_folder(path) for flag, path in paths.items() if path}
    return {flag: folder for flag, folder in folders.items() if not folder.is_local}


def check_buckets(config: TrainingConfig) -> Iterator[Finding]:
    """Check that each folder in Cloud Storage is readable, the output writable, and all in the TPU's region."""
    folders = cloud_folders(config)
    for flag, folder in folders.items():
        num_files = len(folder.list_files())
        if flag == "--output-dir":
            folder.check_writable()
            yield Finding("ok", "bucket", f"{flag} {folder} can be read and written")
        else:
            yield Finding("ok", "bucket", f"{flag} {folder} can be read, {counted(num_files, 'file')}")
    zone = config.hardware.tpu_zone or (read_metadata("instance/zone", 2.0) or "").rpartition("/")[2]
    for bucket in sorted({GCS_PREFIX + bucket_and_name(folder.path)[0] for folder in folders.values()}):
        if zone:
            yield from _check_region(bucket, zone.rpartition("-")[0])


def _check_region(bucket: str, region: str) -> Iterator[Finding]:
    """Warn if a bucket is in a different region from the TPU; accept a multi-region bucket."""
    from mlm_common.storage import gcs  # imports Google's packages, needed only for gs:// paths

    try:
        with gcs.explained_errors(bucket):
            details = gcs.blob_at(f"{bucket}/x").bucket
            details.reload()
    except (InputError, FileNotFoundError):
        return  # the account may read the files, but not the bucket's metadata
    location = details.location.lower()
    if "-" in location and location != region:
        text = f"{bucket} is in {location}, but the TPU is in {region}: reading is slow, and traffic is billed."
        fix = f"Create a bucket there and copy the data: gcloud storage buckets create gs://NAME --location {region}"
        yield Finding("warning", "region", text, fix)
    else:
        yield Finding("ok", "region", f"{bucket} is in {location}, and the TPU is in {region}")


def check_run(config: TrainingConfig) -> Iterator[Finding]:
    fix = "If the machine is busy, try again later. SIGKILL usually means that memory ran out."
    answer = ask_tensorflow("check_run", config, "preparing the run", fix)
    yield Finding("ok", "run", answer["summary"])
    yield check_disk(config, answer["num_parameters"], answer["num_with_one_moment"])


def check_folder(config: TrainingConfig) -> Iterator[Finding]:
    """Report which run --output-dir contains, and check that its newest checkpoint is intact.

    Raises:
        InputError: the folder contains other files, or its `run.json` is damaged.
    """
    if not config.run.output_dir:
        return
    folder = RunFolder(config.run.output_dir)
    # Imported here, so that the doctor reports a broken package in a line of its output.
    from train.checkpoints.run_record import RunRecord
    from train.checkpoints.store import CheckpointStore, DamagedCheckpointError

    recorded = RunRecord.read(folder)
    folder.check_files(recorded.content)
    if recorded.content is None:
        return
    newest = recorded.newest
    with folder.guarded_record():
        task = recorded.content.get("task", {}).get("card", {}).get("task_name", "masked language modeling")
    if newest is None:
        yield Finding("ok", "run", f"{folder} contains a run ({task}) without a checkpoint")
        return
    store = CheckpointStore(folder.checkpoints)
    try:
        store.read_arrays(newest)
    except DamagedCheckpointError as damage:
        text = f"the newest checkpoint of {folder}, {store.path(newest.step)}, is damaged: {damage}."
        yield Finding("warning", "run", text, "The run will resume from the previous checkpoint, if there is one.")
        return
    exported = "exported" if folder.has_export() else "not exported yet"
    steps = f"saved after step {newest.step:,} of {newest.plan.num_steps:,}, intact, {exported}"
    yield Finding("ok", "run", f"{folder} contains a run ({task}), {steps}")


def check_hub(config: TrainingConfig) -> Iterator[Finding]:
    repository = config.hub.repository()
    if repository is not None:
        from train.loop.lifecycle import check_can_push  # imports transformers, which may be broken

        check_can_push(config.hub)
        yield Finding("ok", "Hub", f"the token may write to {repository.repo_id}")


def check_disk(config: TrainingConfig, num_parameters: int, num_with_one_moment: int) -> Finding:
    """Check that the disk has room for the checkpoints and the export.

    If the output folder is in Cloud Storage, they are first written to the local folder for temporary files.
    """
    output_dir = config.run.output_dir
    is_local = output_dir is None or open_folder(output_dir).is_local
    if is_local:
        path = Path(output_dir or ".").absolute()
        folder = next(parent for parent in (path, *path.parents) if parent.exists())
    else:
        folder = Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(folder).free
    # Two more than the newest checkpoints: the best checkpoint, and the checkpoint that is being written.
    num_checkpoints = config.run.keep_checkpoints + 2 if is_local else 1
    num_floats = num_checkpoints * num_in_checkpoint(num_parameters, num_with_one_moment) + num_parameters
    needed_bytes = num_floats * FLOAT32_BYTES
    need = f"the run writes up to {_gb(needed_bytes)}: {counted(num_checkpoints, 'checkpoint')} and the export"
    text = f"{_gb(free_bytes)} free in {folder.resolve()}; {need}"
    if free_bytes >= needed_bytes:
        return Finding("ok", "disk", text)
    if is_local:
        fix = "Free some space, point --output-dir to a larger disk, or keep fewer checkpoints: --keep-checkpoints 1."
    else:
        fix = "Free some space, or point TMPDIR or --output-dir to a larger disk."
    return Finding("error", "disk", f"{text}.", fix)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def print_all(findings: Iterable[Finding]) -> None:
    """Print findings as they arrive, then their counts.

    Raises:
        RunFailedError: a finding was an error.
    """
    counts = Counter[str]()
    for finding in findings:
        counts[finding.status] += 1
        print(finding, flush=True)
    problems = [f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in ("warning", "error")]
    print(f"\n{counts['ok']} ok, {', '.join(problems)}", flush=True)
    if counts["error"]:
        raise RunFailedError("Some checks failed; each error line says how to fix it.")


if __name__ == "__main__":
    run_as_script(main)
