"""Settings of a run that trains a model to embed texts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetuning.config.optimization import FinetuningOptimization
from finetuning.config.settings import ExamplesConfig, FinetunedModel, FinetuningConfig
from mlm_common.cli.settings import Public, flag, require
from mlm_common.errors import InputError
from mlm_common.storage import is_gcs
from train.config import Changeable, PerWorker, Rounding
from train.config.learning import BATCH

# The file with the passages in a folder in BeIR's format.
CORPUS = "corpus.jsonl"


@dataclass(frozen=True)
class EmbeddingData(ExamplesConfig):
    """The texts that are related, and how to read them."""

    train_file: PerWorker[str | None] = flag(
        None,
        "Training rows of a query, a passage that answers it, and optional hard negatives: .tsv, .csv, .jsonl (or "
        ".json) or .parquet; or questions in SQuAD's format, .json or .json.gz; or a folder in BeIR's format, with "
        "corpus.jsonl, queries.jsonl and qrels/, also compressed as .gz. With --unsupervised: one text per row, or a "
        ".txt file with a text per line, or the paragraphs of SQuAD or BeIR. Local or gs://.",
        is_usual=True,
    )
    text_column_names: list[str] = flag(
        list,
        "Columns of the query, the positive passage and the hard negatives, in this order. Default: all but "
        "--score-column-name and id, idx or index. Names that a file does not have are ignored for that file.",
    )
    score_column_name: str | None = flag(
        None,
        "Column with a number that says how similar the two texts of a row are, as in STS-B. The model learns it as "
        "their cosine; if the highest number is above 1, all are divided by it. Evaluations give Spearman's "
        "correlation.",
    )
    unsupervised: bool = flag(
        False,
        "Learn from single texts (SimCSE, Gao et al. 2021): the positive of a text is the same text with different "
        "dropout.",
        is_usual=True,
    )
    query_prompt: Public[str] = flag("", "Text put before each query, such as 'query: '.")
    passage_prompt: Public[str] = flag("", "Text put before each passage, such as 'passage: '.")
    metric_name: Changeable[str | None] = flag(
        None, "Metric that decides which checkpoint is best. Default: ndcg_at_10; for scored pairs, spearmanr."
    )
    baselines: Changeable[bool] = flag(
        True,
        "After training, compare the model's search results with those of BM25, tf-idf, and a random encoder with the "
        "same tokenizer.",
    )

    def check_source(self, path: str, flag: str) -> None:
        """Check that `path` is a file, or a folder in BeIR's format."""
        if is_gcs(path) or not os.path.isdir(path):  # noqa: PTH112 (pathlib's raises if a parent is unreadable)
            super().check_source(path, flag)
        elif not any(os.path.isfile(os.path.join(path, name)) for name in (CORPUS, f"{CORPUS}.gz")):  # noqa: PTH113, PTH118
            subfolders = [
                str(file.parent) for ending in ("", ".gz") for file in sorted(Path(path).glob(f"*/{CORPUS}{ending}"))
            ]
            others = f" or {len(subfolders) - 1} more" if len(subfolders) > 1 else ""
            hint = f" Did you mean {subfolders[0]}{others}? Each command takes one folder." if subfolders else ""
            raise InputError(
                f"{flag} takes a file, or a folder in BeIR's format; {path} is a folder without {CORPUS}.{hint}"
            )


@dataclass(frozen=True)
class EmbeddingModel(FinetunedModel):
    """The model to fine-tune, and how a text's hidden states become one vector."""

    pooling: Literal["mean", "cls"] = flag(
        "mean",
        "How to compute the vector of a text. mean: the mean of its tokens' states. cls: the state of its first token.",
    )
    embedding_dim: int | None = flag(
        None,
        "Width of the vectors; adds a dense layer after pooling. Default: the model's width, without that layer.",
        at_least=1,
    )


@dataclass(frozen=True)
class EmbeddingOptimization(FinetuningOptimization):
    """Batch, loss, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: Rounding[int] = flag(
        64,
        "Rows per replica at once. The negatives of a query are the passages of all other rows on all replicas; with "
        "--gradient-accumulation-steps, the passages of the whole step.",
        alias="per_device_train_batch_size",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    temperature: float = flag(0.05, "Number by which cosines are divided in the loss. SimCSE used 0.05.", above=0)
    symmetric_loss: bool = flag(
        False, "Also train passages to find their queries. The loss is the mean of both directions."
    )
    matryoshka_dims: list[int] = flag(
        list,
        "One or more widths, such as 64 128 256. For each width N, also train the first N numbers of each vector to "
        "work as a vector on their own (Kusupati et al. 2022). The loss is the sum over these widths and the full "
        "width.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = self.matryoshka_dims
        is_valid = sorted(set(dims)) == dims and all(dim >= 1 for dim in dims)
        require(is_valid, "must be increasing numbers of at least 1", "--matryoshka-dims", dims)


@dataclass(frozen=True)
class EmbeddingConfig(FinetuningConfig):
    """All settings of a run that trains embeddings."""

    data: EmbeddingData
    model: EmbeddingModel
    optimization: EmbeddingOptimization
