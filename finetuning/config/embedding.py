"""Settings of a run that trains a model to embed texts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetuning.config.optimization import FinetuningOptimization
from finetuning.config.settings import ExamplesConfig, FinetunedModel, FinetuningConfig
from mlm_common.cli.settings import PUBLIC, flag, require
from mlm_common.errors import InputError
from mlm_common.storage import is_gcs
from train.config.learning import BATCH, PER_WORKER, ROUNDING, changeable

# The file of the passages in a folder in BeIR's form.
CORPUS = "corpus.jsonl"


@dataclass(frozen=True)
class EmbeddingData(ExamplesConfig):
    """Which texts belong together."""

    train_file: str | None = changeable(
        None,
        "Training rows of a query, a passage that answers it, and optional hard negatives: .tsv, .csv, .jsonl (or "
        ".json) or .parquet; or questions in SQuAD's format, .json or .json.gz; or a folder in BeIR's form, with "
        "corpus.jsonl, queries.jsonl and qrels/, also in .gz. With --unsupervised one text per row, also a .txt file "
        "with a text per line, or the paragraphs of SQuAD or BeIR. Local or gs://.",
        PER_WORKER,
        is_usual=True,
    )
    text_column_names: list[str] = flag(
        list,
        "Columns of the query, the positive passage and the hard negatives, in this order. Default: all but "
        "--score-column-name and id, idx or index. Each file takes those of the names that it has.",
    )
    score_column_name: str | None = flag(
        None,
        "Column with a number that says how alike the two texts of a row are, as in STS-B. In training their "
        "cosine becomes the number, divided by the highest one if that is above 1; an evaluation gives Spearman's "
        "correlation.",
    )
    unsupervised: bool = flag(
        False,
        "Learn from single texts: the positive of a text is the same text under other dropout (SimCSE, Gao et al. "
        "2021).",
        is_usual=True,
    )
    query_prompt: str = flag("", "Text put before each query, such as 'query: '.", PUBLIC)
    passage_prompt: str = flag("", "Text put before each passage, such as 'passage: '.", PUBLIC)
    metric_name: str | None = changeable(
        None, "Metric that decides which checkpoint is best. Default: ndcg_at_10; of scored pairs spearmanr."
    )
    baselines: bool = changeable(
        True,
        "After training, compare the search with that of a random encoder with the same tokenizer, of tf-idf and of "
        "BM25.",
    )

    def check_source(self, path: str, flag: str) -> None:
        """Check that a file exists, or a folder in BeIR's form."""
        if is_gcs(path) or not os.path.isdir(path):  # noqa: PTH112 (that of pathlib raises if a parent is unreadable)
            super().check_source(path, flag)
        elif not any(os.path.isfile(os.path.join(path, name)) for name in (CORPUS, f"{CORPUS}.gz")):  # noqa: PTH113, PTH118
            within = [
                str(one.parent) for pattern in ("", ".gz") for one in sorted(Path(path).glob(f"*/{CORPUS}{pattern}"))
            ]
            more = f" or {len(within) - 1} more" if len(within) > 1 else ""
            hint = f" Did you mean {within[0]}{more}? Each command takes one of them." if within else ""
            raise InputError(
                f"{flag} takes a file, or a folder in BeIR's format; {path} is a folder without {CORPUS}.{hint}"
            )


@dataclass(frozen=True)
class EmbeddingModel(FinetunedModel):
    """Which model is fine-tuned, and how its states become one vector."""

    pooling: Literal["mean", "cls"] = flag(
        "mean", "The vector of a text: the mean over its tokens, or the state of the first token."
    )
    embedding_dim: int | None = flag(
        None, "Width of the vectors, by a dense layer on the pooled state. Default: the model's width.", at_least=1
    )


@dataclass(frozen=True)
class EmbeddingOptimization(FinetuningOptimization):
    """Batch, loss, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: int = changeable(
        64,
        "Rows per replica at once. The negatives of a query are the passages of all replicas; with "
        "--gradient-accumulation-steps those of the whole step.",
        ROUNDING,
        alias="per_device_train_batch_size",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    temperature: float = flag(0.05, "Divides the cosines in the loss. SimCSE used 0.05.", above=0)
    symmetric_loss: bool = flag(False, "Let passages choose their queries as well: the mean of both losses.")
    matryoshka_dims: list[int] = flag(
        list,
        "Also train the first N numbers of a vector as a vector, such as 64 128 256 (Kusupati et al. 2022). The loss "
        "is the sum over these and the full width.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = self.matryoshka_dims
        is_right = sorted(set(dims)) == dims and all(dim >= 1 for dim in dims)
        require(is_right, "must be increasing numbers from 1", "--matryoshka-dims", dims)


@dataclass(frozen=True)
class EmbeddingConfig(FinetuningConfig):
    """All settings of one run that trains embeddings."""

    data: EmbeddingData
    model: EmbeddingModel
    optimization: EmbeddingOptimization
