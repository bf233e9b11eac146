"""Check the installation, the machine and, with a run's flags, all that the run will need, before it costs hours.

Accepts all flags of run_mlm.py: run the same command line with doctor.py instead. Without flags it checks the
installation and the machine; with --output-dir alone also the run in that folder, of pretraining or of fine-tuning.
Each line is ok, warning or error, and says how to fix it; the exit status is 1 with an error, 2 for bad flags.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

try:
    from mlm_common.cli.command_line import command
    from mlm_common.errors import RunFailedError
    from train.checks.doctor import packages
    from train.checks.doctor.findings import Finding, findings_of
    from train.config.settings import TrainingConfig, parse_run_flags
except ModuleNotFoundError as missing:
    print(
        f"error    Python         {missing}. Activate the project's environment (source .venv/bin/activate) or make "
        "one: python3 install.py"
    )
    sys.exit(1)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print what each check finds, and fail where one found an error."""
    installed = packages.installed_packages()
    try:
        config, _ = parse_run_flags(argv, __doc__)
    except ImportError as broken:  # of transformers, which reads the flags
        text = f"cannot be read: {broken}. Fix the errors below first; only the installation is checked."
        print_all(chain([Finding("error", "flags", text)], of_packages(installed)))
        return
    print_all(all_findings(config, installed))
    if not _has_run(config):
        print("Pass the flags of a run (run_mlm.py's) to check its shards, buckets, model and Hub repository as well.")


def _has_run(config: TrainingConfig) -> bool:
    return bool(config.data.train_dataset or config.run.phases)


def all_findings(config: TrainingConfig, installed: dict) -> Iterator[Finding]:
    """Yield the findings of all checks; the run as a whole is checked if none of the others found an error."""
    has_errors = False
    for finding in chain(of_packages(installed), of_machine(config, installed), of_inputs(config)):
        has_errors |= finding.status == "error"
        yield finding
    if not _has_run(config):
        if config.run.output_dir:
            yield from _findings("run", "run_inputs.check_folder", config)
    elif has_errors:
        yield Finding("warning", "run", "was not checked: fix the errors above first.")
    else:
        yield from _findings("run", "run_inputs.check_run", config)


def of_packages(installed: dict) -> Iterator[Finding]:
    """Yield the findings on the installation, without importing any of it."""
    for subject, check in (
        ("Python", packages.check_python),
        ("packages", packages.check_requirements),
        ("TensorFlow", packages.check_tensorflow_build),
        ("tf-keras", packages.check_tf_keras),
    ):
        yield from findings_of(subject, check, installed)


def of_machine(config: TrainingConfig, installed: dict) -> Iterator[Finding]:
    """Yield the findings of importing TensorFlow, and on the devices."""
    yield from _findings("import", "libraries.check_import", config)
    yield from _findings("GPU", "libraries.check_gpus", config)
    yield from _findings("TPU", "tpu.check_tpu", config, installed)


def of_inputs(config: TrainingConfig) -> Iterator[Finding]:
    """Yield the findings on buckets, shards and the Hub."""
    yield from _findings("credentials", "run_inputs.check_credentials", config)
    yield from _findings("bucket", "run_inputs.check_buckets", config)
    if _has_run(config):
        yield from _findings("data", "run_inputs.check_data", config)
    yield from _findings("Hub", "run_inputs.check_hub", config)


def print_all(findings: Iterable[Finding]) -> None:
    """Print findings as they come.

    Raises:
        RunFailedError: one of them was an error.
    """
    counts = Counter[str]()
    for finding in findings:
        counts[finding.status] += 1
        print(finding, flush=True)
    print(f"\n{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors", flush=True)
    if counts["error"]:
        raise RunFailedError("Some checks failed; each error line says how to fix it.")


def _findings(subject: str, name: str, *arguments: object) -> Iterator[Finding]:
    """Yield the findings of a check; its module is imported here, because that can fail as well."""

    def check() -> Iterable[Finding]:
        module, _, function = name.partition(".")
        return getattr(importlib.import_module(f"train.checks.doctor.{module}"), function)(*arguments)

    return findings_of(subject, check)


if __name__ == "__main__":
    sys.exit(main())
