"""The settings of stage 2 beside those of the corpus."""

from dataclasses import dataclass
from typing import Literal

from mlm_common.errors import InputError
from mlm_common.settings import flag, require, require_each
from mlm_common.storage import open_folder
from mlm_common.worker_pool import num_cores
from tfrecord_prep.chunking import PAIRS, check_chunking
from tfrecord_prep.segment_pairs import PairRule

MIN_PARTITION_BYTES = 1 << 10
LOCAL_RUNNER = "local"
DATAFLOW_RUNNER = "DataflowRunner"


@dataclass(frozen=True)
class PrepareConfig:
    """How text becomes shards.

    Raises:
        InputError: a setting is missing or out of its range.
    """

    tokenizer_name_or_path: str | None = flag(
        None, "Folder of train-unigram (local or gs://), or model on the Hugging Face Hub. Required."
    )
    output_dir: str | None = flag(
        None, "Local or gs:// folder; each split of the corpus gets a folder in it. Required."
    )
    max_length: int = flag(512, "Tokens a row, framing included. Default: the length BERT and RoBERTa end at.")
    chunking: Literal["concat", "full_sentences", "documents", "packed", "segment_pairs"] = flag(
        "concat",
        "`concat`: documents framed by [CLS] and [SEP] one after the other, cut every --max-length tokens. "
        "`full_sentences`: as RoBERTa, each row framed, [SEP] between documents. `documents`: as many whole "
        "documents in order as fit, each framed, then padding; only a document longer than a row is cut. "
        "`packed`: the same, with documents that fit each other put together: hardly any padding. `segment_pairs`: as "
        "BERT, [CLS] A [SEP] B [SEP], where B follows A or, in half of the rows, is of another document, with a "
        "next_sentence_label for --objective mlm+nsp (docs/guides/second_objective.md); for parity, as RoBERTa found no gain in it.",
    )
    sentences_by: Literal["punctuation", "line"] = flag(
        "punctuation",
        "With --chunking segment_pairs: what a sentence is. `punctuation`: a line, or a part of one that ends in . ! ? "
        "or their like; `line`: a line, as in the text files of google-research/bert.",
    )
    random_share: float = flag(
        0.5,
        "With --chunking segment_pairs: share of the pairs whose second segment is of another document (BERT's 0.5). 0 "
        "for --objective mlm+sop, which asks about the others only; what is one sentence is still in a random pair.",
    )
    shard_size: int = flag(
        16384, "Rows a shard, at most. Default: under 30 MB at --max-length 512, so that several fit in memory."
    )
    partition_bytes: int | None = flag(
        None,
        "Bytes of the corpus, as stored, that make a partition: a unit of work, which a run that is "
        "resumed does not repeat, and whose last row is padded. Default: by the size of the corpus, 1 to 64 MiB. "
        "A file that cannot be cut (.gz, .csv, .json) is in one partition, as a row group of .parquet is, unless there "
        "are so few that the main process reads them and cuts the text.",
    )
    num_workers: int | None = flag(None, "Processes. The shards are the same for any number. Default: one per core.")
    runner: Literal["local", "DirectRunner", "DataflowRunner"] = flag(
        "local",
        "What does the work. `local`: processes of this machine. Apache Beam, which needs "
        "`pip install -e '.[beam]'`: `DirectRunner` on this machine, `DataflowRunner` on Google's. The shards are "
        "the same.",
    )
    beam_options: str = flag(
        "",
        "Options of Apache Beam for --runner, as one argument: "
        "--beam-options='--project=… --region=… --temp_location=gs://…'.",
    )
    overwrite: bool = flag(False, "Delete shards of other settings that stand in the output folder.")
    push_to_hub: str | None = flag(None, "Also push the shards to this data set repository on the Hub (USER/NAME).")
    hub_private: bool = flag(False, "Make the repository of --push-to-hub private when it is created.")
    hub_revision: str | None = flag(
        None, "Branch that is pushed to, made without files where it is missing; by default main."
    )
    publish_details: bool = flag(
        False,
        "Push manifest.json as it is, with the paths of the corpus: its files, folders and buckets. By default these "
        "are withheld.",
    )
    dry_run: bool = flag(False, "Check everything, print the plan, and stop.")
    verify: bool = flag(
        False,
        "Write nothing: read all shards in --output-dir again, check every record, row and sum against the "
        "manifests, and stop at the first difference. Needs no other flag.",
    )

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise InputError("A folder for the shards is needed: --output-dir.")
        if not self.tokenizer_name_or_path and not self.verify:
            raise InputError("A tokenizer is needed: --tokenizer-name-or-path, the folder that train-unigram wrote.")
        check_chunking(self.chunking, self.max_length)
        is_needed = self.sentences_by == "punctuation" or self.chunking == PAIRS
        require(is_needed, f"needs --chunking {PAIRS}", "--sentences-by", f"it with {self.chunking}")
        require_each(self, "random_share", lambda value: 0 <= value <= 1, "must lie in 0 to 1")
        is_needed = self.random_share == PairRule.random_share or self.chunking == PAIRS
        require(is_needed, f"needs --chunking {PAIRS}", "--random-share", f"it with {self.chunking}")
        if self.shard_size < 1:
            raise InputError(f"--shard-size must be 1 row or more; received {self.shard_size}.")
        if self.partition_bytes is not None and self.partition_bytes < MIN_PARTITION_BYTES:
            raise InputError(
                f"--partition-bytes must be at least {MIN_PARTITION_BYTES:,}; received {self.partition_bytes:,}."
            )
        if self.num_workers is not None and self.num_workers < 1:
            raise InputError(f"--num-workers must be 1 or more processes; received {self.num_workers}.")
        self._check_runner()

    def _check_runner(self) -> None:
        if self.beam_options and self.runner == LOCAL_RUNNER:
            raise InputError("--beam-options are for Apache Beam; --runner local does the work without it.")
        if self.runner != DATAFLOW_RUNNER:
            return
        if open_folder(str(self.output_dir)).is_local:
            raise InputError(f"Dataflow's machines write to gs:// only; received --output-dir {self.output_dir}.")
        if self.num_workers is not None:
            raise InputError(
                "--num-workers is for this machine's processes; for Dataflow's machines give "
                f"--beam-options='--num_workers={self.num_workers} --max_num_workers=…'."
            )

    @property
    def num_processes(self) -> int:
        """`num_workers`, or the number of cores that this process may use."""
        return self.num_workers or num_cores()
