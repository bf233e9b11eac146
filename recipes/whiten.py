"""Add a dense layer to a model that whitens its vectors, for `run_embedding.py --init-from … --embedding-dim WIDTH`.

The layer subtracts the mean of the vectors of some texts, and divides each principal direction by its standard
deviation (Su et al. 2021). Without it, all vectors are similar, and training must first spread them.

Examples:
    python recipes/whiten.py work/model squad/train-v1.1.json.gz work/whitened
    python finetuning/run_embedding.py --init-from work/whitened --embedding-dim 192 --learning-rate 1e-3 …
"""

try:
    from mlm_common.cli.command_line import command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import random
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from finetuning.config.embedding import EmbeddingData, EmbeddingOptimization
from finetuning.config.settings import ExamplesConfig
from mlm_common.cli.flag_parser import WHOLE_NUMBER, FlagParser
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.storage import check_folder_or_hub, local_or_hub, open_folder
from train.runtime.run_folder import exported_model

NUM_TEXTS, BATCH_ROWS = 3_000, 64
# Fraction of the mean deviation that is added to each deviation, because directions with small deviations are mostly
# noise.
SMOOTHING = 0.1


def build_parser() -> FlagParser:
    parser = FlagParser((), __doc__)
    parser.add_argument("model", metavar="MODEL", help="Folder of a run or of an export, or a Hub id.")
    parser.add_argument(
        "corpus", metavar="CORPUS", help="Texts: a --corpus of search.py, or a --train-file of run_embedding.py."
    )
    parser.add_argument("output", metavar="OUTPUT", help="Local folder for the new export.")
    parser.add_argument(
        "--max-seq-length", type=WHOLE_NUMBER, default=128, metavar="N", help="Maximum number of tokens per text."
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    from finetuning.data.inputs import run_on_rows  # imports transformers, which --help does not need
    from finetuning.loop.model import ReadModel
    from finetuning.tasks.embedding import VECTOR, Embedding, Encoder
    from mlm_common.tokenizer import load_tokenizer, vocabulary_size
    from train.model.architectures import learns_positions, max_positions
    from train.model.pretrained_files import read_config
    from train.publishing.publisher import write_task_files

    texts = read_passages(arguments.corpus)
    texts = random.Random(0).sample(texts, min(NUM_TEXTS, len(texts)))
    check_folder_or_hub(arguments.model, "MODEL")
    with local_or_hub(exported_model(arguments.model)) as folder:
        model = ReadModel(read_config(folder), load_tokenizer(folder))
        width, length = model.model_config.hidden_size, arguments.max_seq_length
        most = max_positions(model.model_config) if learns_positions(model.model_config) else None
        rule = f"must be at most {most}, the longest row that {arguments.model} can take"
        require(most is None or length <= most, rule, "--max-seq-length", length)
        rule = f"must have more than {width} texts, the width of the model"
        received = f"{len(texts)} in {arguments.corpus}, counting repeated texts once"
        require(len(texts) > width, rule, "CORPUS", received)
        open_folder(arguments.output).check_writable()
        import tensorflow as tf  # takes seconds, so it follows the checks of the input

        from train.model.from_pretrained import load_model
        from train.publishing.pytorch_format import export_model

        plain, whitened = (
            Embedding(Encoder("mean", width, dim, ("", ""), length), 1, EmbeddingOptimization(), **model.task_arguments)
            for dim in (None, width)
        )
        network = whitened.adapt_network(load_model(folder, whitened.model_class, head_labels={}))

    def vectors(rows: dict[str, Any]) -> dict[str, Any]:
        return {VECTOR: plain.vectors(network, rows, training=False), "index": rows["index"]}

    rows, lengths = model.encode_texts((texts,), length), ExamplesConfig(max_seq_length=length).lengths
    step = tf.function(vectors, autograph=False)
    states = plain.in_order(run_on_rows(step, rows, plain.prediction_features(length), lengths, BATCH_ROWS), VECTOR)
    kernel, bias = whitening(states.astype(np.float64))
    (layer,) = network.custom_head.layers
    layer.kernel.assign(kernel)
    layer.bias.assign(bias)
    num_ids = vocabulary_size(model.tokenizer)
    export_model(network, model.tokenizer, arguments.output, model_max_length=length, vocabulary_size=num_ids)
    write_task_files(whitened.card, arguments.output)
    print(f"{len(texts):,} texts, {width} directions  {arguments.output}")
    flags = f"--init-from {shlex.quote(arguments.output)} --embedding-dim {width} --learning-rate 1e-3"
    print(f"next: python finetuning/run_embedding.py {flags} …")


def read_passages(path: str) -> list[str]:
    """Read the distinct texts of a corpus, the paragraphs of SQuAD or BeIR, or the passages of a table of pairs."""
    from finetuning.tasks.beir import is_beir, read_documents
    from finetuning.tasks.pairs import read_splits
    from finetuning.tasks.squad import SQUAD_ENDINGS, NotSquadError, read_paragraphs
    from finetuning.tasks.vectors import read_corpus

    if is_beir(path):
        texts = read_documents(path, "CORPUS")
    elif path.endswith(SQUAD_ENDINGS):
        try:
            texts = [paragraph["context"] for paragraph in read_paragraphs(path, "CORPUS")]
        except NotSquadError:
            texts = read_corpus(path, ())
    else:
        try:
            texts = read_corpus(path, ())
        except InputError as error:
            try:
                _, *passages = read_splits(EmbeddingData(train_file=path))[0].texts
            except InputError:
                raise error from None
            texts = [text for column in passages for text in column]
    return list(dict.fromkeys(text for text in texts if text.strip()))


def whitening(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the kernel (width, width) and the bias (width,) of the dense layer that whitens vectors.

    Args:
        states: the vectors, (texts, width).
    """
    mean = states.mean(axis=0)
    _, sizes, directions = np.linalg.svd(states - mean, full_matrices=False)
    deviations = sizes / np.sqrt(len(states))
    kernel = directions.T / (deviations + SMOOTHING * deviations.mean())
    return kernel, -mean @ kernel


if __name__ == "__main__":
    run_as_script(main)
