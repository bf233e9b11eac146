r"""Collect the predictions of GLUE runs in the zip file that gluebenchmark.com accepts.

Examples:
    python finetuning/glue_submission.py --runs work/cola work/sst2 work/rte \
        --output work/glue.zip
"""

try:
    from mlm_common.cli.command_line import command, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

from finetuning.data.glue import GLUE_TASKS
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import flag, require
from mlm_common.errors import InputError
from mlm_common.storage import output_file
from train.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class SubmissionConfig:
    """The runs to collect, and the file to write."""

    runs: list[str] = flag(list, "Folders of run_classification.py runs with --task-name and --do-predict.")
    output: str = flag("glue_submission.zip", "The zip file, local or gs://.")

    def __post_init__(self) -> None:
        require(bool(self.runs), "is required: the folders of the runs", "--runs", "nothing")
        require(self.output.endswith(".zip"), "must end in .zip", "--output", self.output)


@command
def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_arguments((SubmissionConfig,), argv, __doc__)
    folder, name = output_file(config.output, "--output")
    files: dict[str, str] = {}
    for run in config.runs:
        files |= submission_files(run)
    folder.write_bytes(name, zipped(files))
    missing = sorted({file for task in GLUE_TASKS.values() for _, file in task.all_tests.values()} - files.keys())
    print(f"{config.output}: {', '.join(sorted(files))}" + (f"; missing: {', '.join(missing)}" if missing else ""))


def submission_files(run: str) -> dict[str, str]:
    """Format the predictions of a run for the submission.

    Returns:
        {name of a submission file, without .tsv: its text}.

    Raises:
        InputError: the folder is not a run of a GLUE task, or the run has no predictions.
    """
    folder = RunFolder(run)
    name = folder.read_record()["settings"]["data"].get("task_name") if folder.has_run() else None
    if name is None:
        raise InputError(f"--runs: {run} is not a run of run_classification.py with --task-name.")
    task, files = GLUE_TASKS[name], {}
    for ending, (_, file) in task.all_tests.items():
        predictions_file = f"predict_results_{name}{ending}.txt"
        if not folder.files.exists(predictions_file):
            raise InputError(f"--runs: {run} has no {predictions_file}. Run its command again with --do-predict.")
        # Write a class as its digit in the task's files, and a number with three decimals.
        digits = {label: str(digit) for digit, label in enumerate(task.label_names)}
        lines = [line.split("\t") for line in folder.files.read_text(predictions_file).splitlines()[1:]]
        rows = [
            f"{index}\t{digits[prediction] if digits else f'{float(prediction):.3f}'}\n" for index, prediction in lines
        ]
        files[file] = "index\tprediction\n" + "".join(rows)
    return files


def zipped(files: dict[str, str]) -> bytes:
    """Return the bytes of a zip file of texts. The bytes depend only on the names and texts, not on the time."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(f"{name}.tsv"), text)
    return content.getvalue()


if __name__ == "__main__":
    run_as_script(main)
