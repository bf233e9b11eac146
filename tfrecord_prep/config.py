"""The settings of stage 2 beside those of the corpus."""

from dataclasses import dataclass, field
from typing import Literal

from tfrecord_prep.chunking import check_chunking
from tokenizer_training.command_line import InputError
from tokenizer_training.worker_pool import num_cores

MIN_PARTITION_BYTES = 1 << 10


@dataclass(frozen=True)
class PrepareConfig:
    """How text becomes shards.

    Raises:
        InputError: a setting is missing or out of its range.
    """

    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder of train-unigram (local or gs://), or model on the Hugging Face Hub. Required."},
    )
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Local or gs:// folder; each part of the corpus gets a folder in it. Required."},
    )
    max_length: int = field(
        default=512, metadata={"help": "Tokens a row, framing included. Default: the length BERT and RoBERTa end at."}
    )
    chunking: Literal["concat", "full_sentences"] = field(
        default="concat",
        metadata={
            "help": "`concat`: documents framed by [CLS] and [SEP] one after the other, cut every --max-length tokens. "
            "`full_sentences`: as RoBERTa, each row framed, [SEP] between documents."
        },
    )
    shard_size: int = field(
        default=16384,
        metadata={
            "help": "Rows a shard, at most. Default: under 30 MB at --max-length 512, so that several fit in memory."
        },
    )
    partition_bytes: int = field(
        default=8 << 20,
        metadata={
            "help": "Bytes of text that one worker takes at a time; what ends such a part is padded to a full row. "
            "Default, 8 MiB: seconds of work, a padded row in thousands. More makes fewer, larger shards of a "
            "corpus of terabytes."
        },
    )
    num_workers: int | None = field(
        default=None, metadata={"help": "Processes. The shards are the same for any number. Default: one per core."}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Delete shards of other settings that stand in the output folder."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Check everything, print the plan, and stop."})

    def __post_init__(self) -> None:
        if not self.tokenizer_name_or_path:
            raise InputError("A tokenizer is needed: --tokenizer-name-or-path, the folder that train-unigram wrote.")
        if not self.output_dir:
            raise InputError("A folder for the shards is needed: --output-dir.")
        check_chunking(self.chunking, self.max_length)
        if self.shard_size < 1:
            raise InputError(f"--shard-size must be 1 row or more; received {self.shard_size}.")
        if self.partition_bytes < MIN_PARTITION_BYTES:
            raise InputError(
                f"--partition-bytes must be at least {MIN_PARTITION_BYTES:,}; received {self.partition_bytes:,}."
            )
        if self.num_workers is not None and self.num_workers < 1:
            raise InputError(f"--num-workers must be 1 or more processes; received {self.num_workers}.")

    @property
    def num_processes(self) -> int:
        """`num_workers`, or the number of cores that this process may use."""
        return self.num_workers or num_cores()
