"""Export a checkpoint of a run, or another saved model, for PyTorch; optionally push it to the Hub."""

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlm_common.cli.flag_parser import FlagParser
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.hub.push import MAIN_BRANCH, HubRepository, check_hub_access
from mlm_common.storage import check_folder_or_hub, open_folder
from train import load_tensorflow, multiplies_in_bfloat16
from train.checkpoints.store import CheckpointStore, DamagedCheckpointError, find_checkpoint
from train.config.settings import SUBJECTS, TrainingConfig
from train.metrics.log import VALIDATION
from train.runtime.machines import Cluster, tpu_devices
from train.runtime.run_folder import RunFolder, check_export_folder

if TYPE_CHECKING:
    import numpy as np

    from train.publishing.saved_model import SavedModel

logger = logging.getLogger(__name__)

FORMATS = ("pytorch", "tf")


def build_parser() -> FlagParser:
    parser = FlagParser((), __doc__)
    parser.add_argument(
        "checkpoint",
        nargs="+",
        metavar="CHECKPOINT",
        help="OUTPUT_DIR of run_mlm.py for its newest checkpoint, OUTPUT_DIR/checkpoints/step-… for another, or a "
        "folder or Hub id with config.json and weights. Folders may be local or gs://. With --average: several.",
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="Folder of the export, local or gs://: empty or new, except with --overwrite.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the model in the folder of the export.")
    parser.add_argument(
        "--average",
        action="store_true",
        help="Average the weights of several checkpoints of a run, evaluate the average on the run's validation rows, "
        "and export it.",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="Export the checkpoint of OUTPUT_DIR with the best evaluation instead of the newest.",
    )
    parser.add_argument("--push", metavar="USER/NAME", help="Also push the folder to this repository on the Hub.")
    parser.add_argument("--private", action="store_true", help="Make the repository private when it is created.")
    parser.add_argument(
        "--revision",
        "--hub-revision",
        default=MAIN_BRANCH,
        metavar="NAME",
        help="Branch to push to; created empty if it does not exist.",
    )
    parser.add_argument(
        "--formats",
        default="pytorch",
        metavar="FORMATS",
        help="Formats to write, separated by commas: pytorch (model.safetensors, required), tf (tf_model.h5).",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="Folder or Hub id of the tokenizer, if it has moved since the run."
    )
    return parser


def average_checkpoints(paths: Sequence[str], tokenizer: str | None) -> tuple["SavedModel", str]:
    """Average the weights of checkpoints of one phase of a run, and evaluate the average on the run's validation rows.

    The average of several late checkpoints often has a lower loss than the last checkpoint (Izmailov et al. 2018), if
    the learning rate has not yet decayed.

    Returns:
        The averaged model, with the log of the last checkpoint plus the new evaluation; and a line for the user that
        compares its loss with the last checkpoint's.

    Raises:
        InputError: a path is not a checkpoint, the checkpoints come from different runs or phases, or the run's shards
            are missing.
    """
    import numpy as np

    from train.publishing.saved_model import read_saved_model

    checkpoints = sorted((read_saved_model(path, tokenizer) for path in paths), key=lambda saved: saved.snapshot.step)
    phases = {
        (saved.run_folder and saved.run_folder.path, str(saved.record and saved.record["plan"]))
        for saved in checkpoints
    }
    # A checkpoint counts once, even if a shell's `step-*` named both of its files.
    by_step = {saved.snapshot.step: saved for saved in checkpoints}
    steps, last = list(by_step), checkpoints[-1]
    if len(phases) != 1 or last.record is None or len(steps) < 2:
        raise InputError(f"--average needs different checkpoints of one phase of one run; received {' '.join(paths)}.")
    means = {
        # Average in float64, so that the mean of equal weights is exactly this weight.
        name: np.mean([saved.snapshot.arrays[name] for saved in by_step.values()], axis=0, dtype=np.float64).astype(
            array.dtype
        )
        for name, array in last.snapshot.arrays.items()
    }
    lines = [line for line in last.snapshot.metrics if (line["step"], line["split"]) != (steps[-1], VALIDATION)]
    last_evaluation = next((line for line in last.snapshot.metrics if line not in lines), None)
    summary = f"average of the steps {', '.join(f'{step:,}' for step in steps)}"
    if evaluation := _evaluate(last, means):
        lines.append({"step": steps[-1], "split": VALIDATION, **evaluation})
        summary += f": validation loss {evaluation['loss']:.4f}"
        summary += f"; {last_evaluation['loss']:.4f} at step {steps[-1]:,}" if last_evaluation else ""
    snapshot, record = replace(last.snapshot, arrays=means, metrics=lines), {**last.record, "averaged_steps": steps}
    return replace(last, snapshot=snapshot, record=record), summary


def best_checkpoint(path: str) -> str:
    """Return the path of a run's checkpoint with the best evaluation; the earliest one if several are equally good.

    In a run with phases only the newest phase counts, because other phases may evaluate other rows with other masks.

    Raises:
        InputError: the folder is not a run, no checkpoint in it was evaluated, or a checkpoint is damaged.
    """
    store = CheckpointStore(RunFolder(path).checkpoints)
    try:
        records = [store.read_record(step) for step in sorted(store.steps())]
    except DamagedCheckpointError as error:
        raise InputError(f"--best: a checkpoint in {store.folder} is damaged: {error}. Name another one.") from error
    phases = [record.plan.phase_index for record in records]
    evaluated = [
        (record.rank, -record.step)
        for record, phase in zip(records, phases, strict=True)
        if record.rank is not None and phase == phases[-1]
    ]
    require(bool(evaluated), "needs the OUTPUT_DIR of a run with an evaluated checkpoint", "--best", path)
    return store.path(-max(evaluated)[1])


def _evaluate(saved: "SavedModel", weights: "dict[str, np.ndarray]") -> dict[str, float] | None:
    """Evaluate a run's model with other weights; return None if the run has no validation rows."""
    from train.loop.lifecycle import Pretraining
    from train.loop.trainer import Trainer
    from train.runtime.preemption import StopRequest
    from train.runtime.strategy import connect
    from train.runtime.tensorflow_runtime import TensorFlowRuntime

    assert saved.record is not None
    settings = saved.record["settings"]
    # Open the phase as a run without phases, on the recorded shards.
    without_phases: dict[str, Any] = {"phases": None, "overwrite_output_dir": False, "report_to": []}
    settings = {**settings, "run": settings["run"] | without_phases}
    # This machine may lack features of the run's machine, such as bfloat16 instructions or TPUs.
    if settings["hardware"]["bfloat16"] and not multiplies_in_bfloat16():
        settings["hardware"] = settings["hardware"] | {"jit_compile": None}
    if not tpu_devices():
        settings["hardware"] = settings["hardware"] | {"no_tpu": True}
    config = TrainingConfig(*(kind(**settings[name]) for name, kind in zip(settings, SUBJECTS, strict=True)))
    run = Pretraining().open_run(config, Cluster())
    runtime = TensorFlowRuntime(connect(config.hardware, run.cluster))
    trainer = Trainer(run.planned(runtime.num_replicas), 0, runtime)
    if trainer.add_up is None:
        logger.warning("The run has no --eval-dataset, so the average is not evaluated.")
        return None
    trainer.state.write(trainer.state.read() | weights)
    return trainer.evaluate(StopRequest())


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    log_start(__file__)
    formats = {name.strip() for name in arguments.formats.split(",")}
    if "onnx" in formats:
        raise InputError(
            "--formats onnx is not supported. Convert the PyTorch export with Hugging Face's exporter: optimum-cli "
            "export onnx --model OUTPUT ONNX_OUTPUT."
        )
    if not formats <= set(FORMATS) or "pytorch" not in formats:
        raise InputError(f"--formats must be pytorch, or pytorch,tf; received {arguments.formats}.")
    if arguments.average != (len(arguments.checkpoint) > 1):
        rule = "--average needs at least two checkpoints and an OUTPUT; several checkpoints need --average"
        raise InputError(f"{rule}; received {' '.join((*arguments.checkpoint, arguments.output))}.")
    require(not (arguments.best and arguments.average), "cannot be combined with --average", "--best", True)
    if arguments.tokenizer is not None:
        check_folder_or_hub(arguments.tokenizer, "--tokenizer")
    output = open_folder(arguments.output)
    check_export_folder(output, overwrite=arguments.overwrite)
    repository = None
    if arguments.push:
        repository = HubRepository(arguments.push, private=arguments.private, branch=arguments.revision)
        check_hub_access(repository)
    paths = [best_checkpoint(path) for path in arguments.checkpoint] if arguments.best else arguments.checkpoint
    for path in paths:
        find_checkpoint(path)
    load_tensorflow()  # not needed to reject bad input
    from train.publishing.saved_model import read_saved_model

    if arguments.average:
        saved, summary = average_checkpoints(paths, arguments.tokenizer)
        print(summary)
    else:
        saved = read_saved_model(paths[0], arguments.tokenizer)
    saved.publish(output, repository, with_tf_weights="tf" in formats)
    print(f"model: {arguments.output}" + (f", pushed to {repository.repo_id}" if repository else ""))


if __name__ == "__main__":
    run_as_script(main)
