"""Check the installation, the machine and, with a run's flags, all that the run will need, before it costs hours.

Accepts all flags of run_mlm.py: run the same command line with doctor.py instead. Without flags it checks the
installation and the machine; with --output-dir alone also the run in that folder, of pretraining or of fine-tuning.
Each line is ok, warning or error, and says how to fix it; the exit status is 1 with an error, 2 for bad flags.
"""

try:
    from mlm_common.cli.command_line import command
    from mlm_common.errors import InputError, RunFailedError
    from mlm_common.storage import Folder, open_folder
    from mlm_common.storage.folder import GCS_PREFIX, bucket_and_name
    from train.checks import machine, platforms
    from train.checks.machine import Finding, ask_tensorflow, findings_of
    from train.config.settings import TrainingConfig, parse_run_flags
    from train.runtime.machines import read_metadata
    from train.runtime.plan import FLOAT32_BYTES, num_in_checkpoint, phases_of
    from train.runtime.run_folder import RunFolder
except ModuleNotFoundError as missing:
    print(
        f"error    Python         {missing}. Activate the project's environment (source .venv/bin/activate) or make "
        "one: python3 install.py"
    )
    raise SystemExit(1) from None
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

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
        print("Pass the flags of a run (run_mlm.py's) to check its shards, buckets, model and Hub repository as well.")


def _has_run(config: TrainingConfig) -> bool:
    return bool(config.data.train_dataset or config.run.phases)


def all_findings(config: TrainingConfig) -> Iterator[Finding]:
    has_errors = False
    of_machine = (findings_of(subject, check, config) for subject, check in MACHINE)
    of_inputs = (findings_of("bucket", check_buckets, config), findings_of("Hub", check_hub, config))
    for finding in chain(of_installation(), *of_machine, *of_inputs):
        # Without its TPU here, all the rest of a run can be checked.
        has_errors |= finding.status == "error" and finding.subject != "TPU"
        yield finding
    if not _has_run(config):
        yield from findings_of("run", check_folder, config)
    elif has_errors:
        yield Finding("warning", "run", "was not checked: fix the errors above first.")
    else:
        yield from findings_of("run", check_run, config)


def of_installation() -> Iterator[Finding]:
    installed = machine.installed_packages()
    return chain.from_iterable(findings_of(subject, check, installed) for subject, check in INSTALLATION)


def cloud_folders(config: TrainingConfig) -> dict[str, Folder]:
    paths: dict[str, str | None] = {}
    for phase in phases_of(config):
        of_phase = f" of phase `{phase.name}`" if phase.name else ""
        paths |= {f"{flag}{of_phase}": path for flag, path in phase.config.data.folders().items()}
    paths["--output-dir"] = config.run.output_dir
    folders = {flag: open_folder(path) for flag, path in paths.items() if path}
    return {flag: folder for flag, folder in folders.items() if not folder.is_local}


def check_buckets(config: TrainingConfig) -> Iterator[Finding]:
    """Check that each folder in Cloud Storage can be read, and written if a run writes to it; compare the regions."""
    folders = cloud_folders(config)
    for flag, folder in folders.items():
        num_files = len(folder.list_files())
        if flag == "--output-dir":
            folder.check_writable()
            yield Finding("ok", "bucket", f"{flag} {folder} can be read and written")
        else:
            yield Finding("ok", "bucket", f"{flag} {folder} can be read, {num_files} files")
    zone = config.hardware.tpu_zone or (read_metadata("instance/zone", 2.0) or "").rpartition("/")[2]
    for bucket in sorted({GCS_PREFIX + bucket_and_name(one.path)[0] for one in folders.values()}):
        if zone:
            yield from _check_region(bucket, zone.rpartition("-")[0])


def _check_region(bucket: str, region: str) -> Iterator[Finding]:
    """Compare the region of a bucket with the TPU's; one that is in several regions is not compared."""
    from mlm_common.storage import gcs  # Google's packages, for gs:// paths alone

    try:
        with gcs.explained_errors(bucket):
            details = gcs.blob_at(f"{bucket}/x").bucket
            details.reload()
    except (InputError, FileNotFoundError):
        return  # the account may read the files, but not the bucket's own data
    location = details.location.lower()
    if "-" in location and location != region:
        text = f"{bucket} is in {location}, the TPU in {region}: reading is slow, and traffic is billed."
        fix = f"Create a bucket there and copy the data: gcloud storage buckets create gs://NAME --location {region}"
        yield Finding("warning", "region", text, fix)
    else:
        yield Finding("ok", "region", f"{bucket} is in {location}, the TPU in {region}")


def check_run(config: TrainingConfig) -> Iterator[Finding]:
    answer = ask_tensorflow("check_run", config, "preparing the run", "This machine may have too little memory for it.")
    yield Finding("ok", "run", answer["summary"])
    yield check_disk(config, answer["num_parameters"], answer["num_with_one_moment"])


def check_folder(config: TrainingConfig) -> Iterator[Finding]:
    """Check which run the folder contains, of pretraining or fine-tuning, and that its newest checkpoint is intact."""
    folder = RunFolder(config.run.output_dir) if config.run.output_dir else None
    if folder is None or not folder.has_run():
        return
    # Not at the top: that a package is broken must be a line of the doctor.
    from train.checkpoints.store import CheckpointStore, DamagedCheckpointError, newest_record

    newest = newest_record(folder)
    with folder.guarded_record():
        task = folder.read_record().get("task", {}).get("card", {}).get("task_name", "masked language modeling")
    if newest is None:
        yield Finding("ok", "run", f"{folder} contains a run ({task}) without a checkpoint")
        return
    store = CheckpointStore(folder.checkpoints)
    try:
        store.read_arrays(newest)
    except DamagedCheckpointError as damage:
        text = f"the newest checkpoint of {folder}, {store.path(newest.step)}, is damaged: {damage}."
        yield Finding("warning", "run", text, "A run resumes from the one before it, if there is one.")
        return
    exported = "exported" if folder.has_export() else "not exported yet"
    steps = f"saved after step {newest.step:,} of {newest.plan['num_steps']:,}, intact, {exported}"
    yield Finding("ok", "run", f"{folder} contains a run ({task}), {steps}")


def check_hub(config: TrainingConfig) -> Iterator[Finding]:
    repository = config.hub.repository()
    if repository is not None:
        from train.loop.lifecycle import check_can_push  # transformers, which may be broken

        check_can_push(config.hub)
        yield Finding("ok", "Hub", f"the token may write to {repository.repo_id}")


def check_disk(config: TrainingConfig, num_parameters: int, num_with_one_moment: int) -> Finding:
    """Check the room for checkpoints and export; those for Cloud Storage are made in the folder for temporary files."""
    output_dir = config.run.output_dir
    is_local = output_dir is None or open_folder(output_dir).is_local
    wanted = Path(output_dir or ".").absolute()
    folder = next(one for one in (wanted, *wanted.parents) if one.exists()) if is_local else Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(folder).free
    # The newest, that of the lowest loss, and the one being written.
    num_checkpoints = config.run.keep_checkpoints + 2 if is_local else 1
    num_numbers = num_checkpoints * num_in_checkpoint(num_parameters, num_with_one_moment) + num_parameters
    needed_bytes = num_numbers * FLOAT32_BYTES
    needs = f"the run writes up to {_gb(needed_bytes)}: {num_checkpoints} checkpoints and the export"
    text = f"{_gb(free_bytes)} free in {folder.resolve()}; {needs}"
    if free_bytes >= needed_bytes:
        return Finding("ok", "disk", text)
    more = "or keep fewer with --keep-checkpoints 1" if is_local else "(or with TMPDIR)"
    return Finding("error", "disk", f"{text}.", f"Free some space, name a larger disk with --output-dir {more}.")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def print_all(findings: Iterable[Finding]) -> None:
    """Print findings as they come; RunFailedError if one of them was an error."""
    counts = Counter[str]()
    for finding in findings:
        counts[finding.status] += 1
        print(finding, flush=True)
    numbers = [f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in ("warning", "error")]
    print(f"\n{counts['ok']} ok, {', '.join(numbers)}", flush=True)
    if counts["error"]:
        raise RunFailedError("Some checks failed; each error line says how to fix it.")


if __name__ == "__main__":
    run_as_script(main)
