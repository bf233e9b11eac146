"""Export a checkpoint of a run, or another saved model, for PyTorch; push it to the Hub if you ask for it."""

import argparse
import sys
from collections.abc import Sequence

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from mlm_common.cli.console import add_verbose_flag
from mlm_common.errors import InputError
from mlm_common.hub.push import MAIN_BRANCH, HubRepository, check_hub_access
from mlm_common.storage import open_folder

FORMATS = ("pytorch", "tf")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "checkpoint",
        nargs="+",
        help="OUTPUT_DIR of run_mlm.py for its newest checkpoint, OUTPUT_DIR/checkpoints/step-… for another, or a "
        "folder or Hub id with config.json and weights. Local or gs://. Several with --average.",
    )
    parser.add_argument("output", help="Folder of the export, local or gs://.")
    parser.add_argument(
        "--average",
        action="store_true",
        help="Export the mean of the weights of several checkpoints of a run, evaluated on its validation rows first.",
    )
    parser.add_argument("--push", metavar="USER/NAME", help="Also push the folder to this repository on the Hub.")
    parser.add_argument("--private", action="store_true", help="Make the repository private when it is created.")
    parser.add_argument(
        "--revision",
        "--hub-revision",
        default=MAIN_BRANCH,
        help="Branch to push to; created empty if it does not exist.",
    )
    parser.add_argument(
        "--formats",
        default="pytorch",
        help="Formats to write, separated by commas: pytorch (model.safetensors, always), tf (tf_model.h5).",
    )
    parser.add_argument("--tokenizer", help="Folder or Hub id of the tokenizer, if it has moved since the run.")
    add_verbose_flag(parser)
    return parser


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
        rule = "--average needs two checkpoints at least, and an OUTPUT; several checkpoints need --average"
        raise InputError(f"{rule}; received {' '.join((*arguments.checkpoint, arguments.output))}.")
    output = open_folder(arguments.output)
    output.check_writable()
    repository = None
    if arguments.push:
        repository = HubRepository(arguments.push, private=arguments.private, branch=arguments.revision)
        check_hub_access(repository)
    from train.loop.averaging import average_checkpoints  # TensorFlow, not for --help
    from train.publishing.saved_model import read_saved_model

    if arguments.average:
        saved, told = average_checkpoints(arguments.checkpoint, arguments.tokenizer)
        print(told)
    else:
        saved = read_saved_model(arguments.checkpoint[0], arguments.tokenizer)
    saved.publish(output, repository, with_tf_weights="tf" in formats)
    print(f"model: {arguments.output}" + (f", pushed to {repository.repo_id}" if repository else ""))


if __name__ == "__main__":
    sys.exit(main())
