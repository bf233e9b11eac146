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
    from train.checks.doctor import machine
    from train.checks.doctor.machine import Finding, findings_of
    from train.config.settings import TrainingConfig, parse_run_flags
except ModuleNotFoundError as missing:
    print(
        f"error    Python         {missing}. Activate the project's environment (source .venv/bin/activate) or make "
        "one: python3 install.py"
    )
    sys.exit(1)


INSTALLATION = (
    ("Python", machine.check_python),
    ("packages", machine.check_requirements),
    ("TensorFlow", machine.check_tensorflow_build),
    ("tf-keras", machine.check_tf_keras),
)
MACHINE = (("import", machine.check_import), ("GPU", machine.check_gpus), ("TPU", machine.check_tpu))


@command
def main(argv: Sequence[str] | None = None) -> None:
    try:
        config, _ = parse_run_flags(argv, __doc__)
    except ImportError as broken:  # of transformers, which reads the flags
        text = f"cannot be read: {broken}. Fix the errors below first; only the installation is checked."
        print_all(chain([Finding("error", "flags", text)], of_installation()))
        return
    print_all(all_findings(config))
    if not _has_run(config):
        print("Pass the flags of a run (run_mlm.py's) to check its shards, buckets, model and Hub repository as well.")


def _has_run(config: TrainingConfig) -> bool:
    return bool(config.data.train_dataset or config.run.phases)


def all_findings(config: TrainingConfig) -> Iterator[Finding]:
    has_errors = False
    of_machine = (findings_of(subject, check, config) for subject, check in MACHINE)
    of_inputs = (_findings("bucket", "check_buckets", config), _findings("Hub", "check_hub", config))
    for finding in chain(of_installation(), *of_machine, *of_inputs):
        has_errors |= finding.status == "error"
        yield finding
    if not _has_run(config):
        yield from _findings("run", "check_folder", config)
    elif has_errors:
        yield Finding("warning", "run", "was not checked: fix the errors above first.")
    else:
        yield from _findings("run", "check_run", config)


def of_installation() -> Iterator[Finding]:
    installed = machine.installed_packages()
    return chain.from_iterable(findings_of(subject, check, installed) for subject, check in INSTALLATION)


def _findings(subject: str, name: str, config: TrainingConfig) -> Iterator[Finding]:
    """Yield what a check of `run_inputs` finds, whose import can fail as well."""

    def check() -> Iterable[Finding]:
        return getattr(importlib.import_module("train.checks.doctor.run_inputs"), name)(config)

    return findings_of(subject, check)


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
    sys.exit(main())
