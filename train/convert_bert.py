"""Convert a checkpoint of Google's BERT or ALBERT (TF1) or of Model Garden's BERT for PyTorch and --init-from."""

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
from argparse import BooleanOptionalAction
from collections.abc import Sequence

from mlm_common.cli.flag_parser import FlagParser
from mlm_common.cli.process import run_as_script
from mlm_common.storage import open_folder
from train.runtime.run_folder import check_export_folder


def build_parser() -> FlagParser:
    parser = FlagParser((), __doc__)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="Folder with the checkpoint, its configuration and its vocabulary; or a .zip of such a folder; or, if the "
        "folder has several checkpoints, the path of one without .index. Local or gs://. The optimizer's state is "
        "skipped.",
    )
    parser.add_argument(
        "output", metavar="OUTPUT", help="Folder of the model, local or gs://: empty or new, except with --overwrite."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the model in that folder.")
    parser.add_argument(
        "--do-lower-case",
        action=BooleanOptionalAction,
        help="The model lower-cases text; --no-do-lower-case: it does not. Required if no file name contains cased or "
        "uncased.",
    )
    parser.add_argument(
        "--bert-config", metavar="FILE", help="Configuration file, if it is not in the folder of the checkpoint."
    )
    parser.add_argument(
        "--vocabulary",
        metavar="FILE",
        help="vocab.txt or SentencePiece .model, if it is not in the folder of the checkpoint.",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    log_start(__file__)
    output = open_folder(arguments.output)
    check_export_folder(output, overwrite=arguments.overwrite)
    from train.publishing.google_checkpoint import read_google_checkpoint  # imports transformers, not needed for --help

    checkpoint = read_google_checkpoint(
        arguments.checkpoint,
        config=arguments.bert_config,
        vocabulary=arguments.vocabulary,
        do_lower_case=arguments.do_lower_case,
    )
    from train.publishing.pytorch_format import exported_tokenizer, pytorch_config, write_model

    config = checkpoint.config
    tokenizer = exported_tokenizer(checkpoint.tokenizer, config, config.max_position_embeddings)
    with output.staging() as local_folder:
        write_model(local_folder, checkpoint.weights, pytorch_config(config, checkpoint.class_name), tokenizer)
        output.upload_folder(local_folder)
    if checkpoint.left_out:
        print(f"not converted, because they belong to other heads: {', '.join(checkpoint.left_out)}")
    print(f"{checkpoint.class_name} with a vocabulary of {config.vocab_size:,} tokens: {arguments.output}")


if __name__ == "__main__":
    run_as_script(main)
