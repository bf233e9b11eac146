"""Settings of a search with a model that embeds texts."""

from dataclasses import dataclass

from mlm_common.cli.settings import Bounded, flag, require


@dataclass(frozen=True)
class SearchConfig(Bounded):
    """The questions, the model and the texts that are searched, and where the vectors of the texts are kept."""

    FLAG_GROUP = "Vectors"

    question: list[str] = flag(
        list,
        "What to search for. Without one the texts are only embedded.",
        metavar="QUESTION",
        group="Search",
        is_positional=True,
    )
    model: str = flag(
        "", "Folder of a run_embedding.py run, or of its export, local or gs://, or a Hub id.", group="Search"
    )
    corpus: str = flag(
        "",
        "File with the texts, or a quoted glob of such files: .tsv, .csv, .jsonl, .parquet (a text per row) or .txt (a "
        "text a line), also in .gz. Local or gs://.",
        group="Search",
        metavar="FILE",
    )
    text_column_names: list[str] = flag(
        list,
        "Columns whose texts are joined to one. Default: title, if there is one, and text; or the only column of text.",
        group="Search",
    )
    top_k: int = flag(10, "Texts to show for each question.", group="Search", at_least=1)
    vectors_dir: str | None = flag(
        None, "Folder for the vectors of the texts, local or gs://. Default: the name of --corpus with .vectors."
    )
    shard_rows: int = flag(10_000, "Vectors in a file. A file is what an interrupted command loses.", at_least=1)
    overwrite: bool = flag(False, "Replace the vectors of another model or other texts in the folder.")
    per_replica_batch_size: int = flag(64, "Texts that are embedded at once. Lower it if memory runs out.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.model), "is required: a model that embeds texts", "--model", "nothing")
        require(bool(self.corpus), "is required: a file with the texts to search", "--corpus", "nothing")
        is_named = self.vectors_dir is not None or not any(sign in self.corpus for sign in "*?[")
        require(is_named, "is required where --corpus is a glob", "--vectors-dir", "nothing")

    @property
    def folder(self) -> str:
        return self.vectors_dir or f"{self.corpus}.vectors"
