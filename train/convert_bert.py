"""Convert a TF1 checkpoint of Google's BERT or ALBERT, or one of Model Garden's BERT, for PyTorch and --init-from."""

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import argparse
from collections.abc import Sequence

from mlm_common.cli.console import add_verbose_flag
from mlm_common.cli.process import run_as_script
from mlm_common.storage import open_folder


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "checkpoint",
        help="Folder with the checkpoint, its configuration and its vocabulary, a .zip of one, or the path of one of "
        "several checkpoints without .index. Local or gs://. The state of its optimizer is skipped.",
    )
    parser.add_argument("output", help="Folder of the model, local or gs://.")
    parser.add_argument(
        "--do-lower-case",
        action=argparse.BooleanOptionalAction,
        help="Lower-case all text, or not; required if no file name says cased or uncased.",
    )
    parser.add_argument("--bert-config", help="Configuration file, if it is not in the folder of the checkpoint.")
    parser.add_argument(
        "--vocabulary", help="vocab.txt, or SentencePiece's .model, if it is not in the folder of the checkpoint."
    )
    add_verbose_flag(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    log_start(__file__)
    output = open_folder(arguments.output)
    output.check_writable()
    from train.publishing.google_checkpoint import read_google_checkpoint  # transformers, not for --help

    read = read_google_checkpoint(
        arguments.checkpoint,
        config=arguments.bert_config,
        vocabulary=arguments.vocabulary,
        do_lower_case=arguments.do_lower_case,
    )
    from train.publishing.pytorch_format import exported_tokenizer, pytorch_config, write_model  # TensorFlow

    tokenizer = exported_tokenizer(read.tokenizer, read.config, read.config.max_position_embeddings)
    with output.staging() as local_folder:
        write_model(local_folder, read.weights, pytorch_config(read.config, read.class_name), tokenizer)
        output.upload_folder(local_folder)
    if read.left_out:
        print(f"not converted, since they belong to other heads: {', '.join(read.left_out)}")
    print(f"{read.class_name} of {read.config.vocab_size:,} tokens: {arguments.output}")


if __name__ == "__main__":
    run_as_script(main)
