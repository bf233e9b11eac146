"""The settings of stage 2, in addition to those of the corpus."""

from dataclasses import dataclass
from typing import Literal

from mlm_common.cli.settings import Bounded, flag, flag_of, require
from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from mlm_common.workers import num_cores
from tfrecord_prep.manifest import PAIRS
from tfrecord_prep.segment_pairs import PairRule

# Two of a row's ids are framing; fewer than six others would leave rows that are mostly framing.
MIN_LENGTH = 8
MIN_PARTITION_BYTES = 1 << 10
LOCAL_RUNNER = "local"
DATAFLOW_RUNNER = "DataflowRunner"


@dataclass(frozen=True)
class PrepareConfig(Bounded):
    """How text becomes shards.

    Raises:
        InputError: a setting is missing or out of its range.
    """

    FLAG_GROUP = "Shards"

    tokenizer_name_or_path: str | None = flag(
        None,
        "Folder of the tokenizer that train_unigram.py saved (local or gs://), or a model on the Hub.",
        metavar="DIR",
        is_usual=True,
    )
    output_dir: str | None = flag(
        None, "Folder for the shards, local or gs://; each split of the corpus gets a folder in it.", is_usual=True
    )
    max_length: int = flag(
        512,
        "Tokens per row, [CLS] and [SEP] included. BERT and RoBERTa used 512; question answering needs 384 or more.",
        is_usual=True,
        at_least=MIN_LENGTH,
    )
    chunking: Literal["concat", "full_sentences", "documents", "packed", "segment_pairs"] = flag(
        "concat",
        "How documents become rows. concat: [CLS] document [SEP], one after the other, cut every --max-length "
        "tokens. full_sentences: as RoBERTa, each row is framed, with [SEP] between documents. documents: as many "
        "whole documents as fit, in order, then padding; only a document longer than a row is cut. packed: the "
        "same, but documents that fit together are combined, with hardly any padding. segment_pairs: as BERT, "
        "[CLS] A [SEP] B [SEP], where B follows A or comes from another document, with a next_sentence_label for "
        "--objective mlm+nsp; use it to reproduce BERT, since RoBERTa found no gain in it.",
        is_usual=True,
    )
    sentences_by: Literal["punctuation", "line"] = flag(
        "punctuation",
        "With --chunking segment_pairs: what a sentence is. punctuation: a line, or a part of one that ends in . "
        "! ? or similar. line: a line, as in the text files of google-research/bert.",
    )
    random_share: float = flag(
        0.5,
        "With --chunking segment_pairs: fraction of the pairs whose second segment comes from another document. "
        "BERT used 0.5; use 0 for --objective mlm+sop.",
        at_least=0,
        at_most=1,
    )
    shard_size: int | None = flag(
        None,
        "Rows per shard, at most. Default: 16,384, or fewer of rows over 512 tokens: shards stay under 30 MB.",
        at_least=1,
    )
    partition_bytes: int | None = flag(
        None,
        "Bytes of the corpus per unit of work. A resumed run does not repeat finished units, and the last row of "
        "each is padded. Default: 1 to 64 MiB, by the size of the corpus. A file that cannot be cut (.gz, .csv, "
        ".json) and a row group of .parquet are one unit, unless there are so few that the main process reads "
        "them and cuts the text.",
        at_least=MIN_PARTITION_BYTES,
    )
    num_workers: int | None = flag(
        None,
        "Number of worker processes; the result does not depend on it. Default: one per core.",
        is_usual=True,
        at_least=1,
    )
    runner: Literal["local", "DirectRunner", "DataflowRunner"] = flag(
        "local",
        "What does the work. local: processes on this machine. DirectRunner and DataflowRunner: Apache Beam on "
        "this machine and on Google Cloud; install it with `python3 install.py --with beam`. The shards are the same.",
    )
    beam_options: str = flag(
        "",
        "Options for Apache Beam, as one argument: --beam-options='--project=… --region=… --temp_location=gs://…'.",
        metavar="TEXT",
    )
    drop_duplicates: bool = flag(
        False,
        "Leave out documents whose text was seen before, in the same or another source: in validation, then test, then "
        "the rest, so that nothing is trained on that is evaluated on. Upper and lower case, Unicode's compatible "
        "forms (NFKC) and runs of white space make no difference. The text is read twice.",
        is_usual=True,
    )
    overwrite: bool = flag(False, "Replace shards in --output-dir that were made with other settings.", is_usual=True)
    push_to_hub: str | None = flag(
        None, "Also push the shards to this data set repository on the Hub.", metavar="USER/NAME", group="Hub"
    )
    hub_private: bool = flag(False, "Make the repository private when it is created.", group="Hub")
    hub_revision: str | None = flag(
        None, "Branch to push to; created if it does not exist. Default: main.", group="Hub"
    )
    publish_details: bool = flag(
        False,
        "Do not redact the paths of the corpus (files, folders and buckets) in manifest.json. Default: these are "
        "redacted.",
        group="Hub",
    )
    dry_run: bool = flag(False, "Check everything, print the plan, and stop.", is_usual=True)
    verify: bool = flag(
        False,
        "Write nothing: read all shards in --output-dir again, compare every record, row and sum with the "
        "manifests, and stop at the first difference. Needs no other flag.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output_dir:
            raise InputError("--output-dir is required: the folder for the shards.")
        if not self.tokenizer_name_or_path and not self.verify:
            raise InputError(
                "--tokenizer-name-or-path is required: the folder that train_unigram.py wrote, or a model on the Hub."
            )
        is_needed = self.sentences_by == "punctuation" or self.chunking == PAIRS
        require(is_needed, f"needs --chunking {PAIRS}", "--sentences-by", f"it with {self.chunking}")
        is_needed = self.random_share == PairRule.random_share or self.chunking == PAIRS
        require(is_needed, f"needs --chunking {PAIRS}", "--random-share", f"it with {self.chunking}")
        for name in ("hub_private", "hub_revision", "publish_details"):
            value = getattr(self, name)
            require(bool(self.push_to_hub) or not value, "needs --push-to-hub", flag_of(name), value)
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
        """Return `num_workers`, or the number of cores that this process may use."""
        return self.num_workers or num_cores()
