"""The settings of stage 2, in addition to the settings of the corpus."""

from dataclasses import dataclass
from typing import Literal

from mlm_common.cli.settings import Bounded, flag, flag_of, require
from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from mlm_common.workers import num_cores
from tfrecord_prep.manifest import PAIRS
from tfrecord_prep.segment_pairs import PairRule

# [CLS] and [SEP] take two ids of each row. With fewer than six ids of text in a row, these two ids would take up much
# of the row.
MIN_LENGTH = 8
MIN_PARTITION_BYTES = 1 << 10
LOCAL_RUNNER = "local"
DATAFLOW_RUNNER = "DataflowRunner"


@dataclass(frozen=True)
class PrepareConfig(Bounded):
    """How text becomes shards: each field is a flag, whose help text describes it.

    Raises:
        InputError: a setting is missing, out of range, or incompatible with another one.
    """

    FLAG_GROUP = "Shards"

    tokenizer_name_or_path: str | None = flag(
        None,
        "Folder of the tokenizer that train_unigram.py saved (local or gs://), or a model on the Hub.",
        metavar="DIR",
        is_usual=True,
    )
    output_dir: str | None = flag(
        None, "Folder for the shards, local or gs://. Each split of the corpus gets a subfolder.", is_usual=True
    )
    max_length: int = flag(
        512,
        "Tokens per row, [CLS] and [SEP] included. BERT and RoBERTa used 512; question answering needs 384 or more.",
        is_usual=True,
        at_least=MIN_LENGTH,
    )
    chunking: Literal["concat", "full_sentences", "documents", "packed", "segment_pairs"] = flag(
        "concat",
        "How documents fill rows. concat: [CLS] document [SEP], one after the other, cut every --max-length tokens. "
        "full_sentences: the same, but each row starts with [CLS] and ends with [SEP], as in RoBERTa. documents: as "
        "many whole documents as fit, in order, then padding. packed: the same, reordered so that hardly any padding "
        "is needed. segment_pairs: [CLS] A [SEP] B [SEP] with a next_sentence_label, as in BERT, for --objective "
        "mlm+nsp.",
        is_usual=True,
    )
    sentences_by: Literal["punctuation", "line"] = flag(
        "punctuation",
        "With --chunking segment_pairs: how to find sentences. punctuation: a sentence ends at . ! ? or similar, and "
        "at the end of a line. line: each line is a sentence, as in the text files of google-research/bert.",
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
        "Maximum number of rows per shard. Default: 16,384, or fewer if rows have more than 512 tokens, so that a "
        "shard stays under 30 MB.",
        at_least=1,
    )
    partition_bytes: int | None = flag(
        None,
        "Number of bytes of the corpus per unit of work. A resumed run does not repeat finished units. The last row "
        "of each unit is padded. Default: 1 to 64 MiB, depending on the size of the corpus. A file that cannot be cut "
        "(.gz, .csv, .json) is one unit, and so is a row group of .parquet. If there are few of these, the main "
        "process reads them and cuts the text instead.",
        at_least=MIN_PARTITION_BYTES,
    )
    num_workers: int | None = flag(
        None,
        "Number of worker processes. The result does not depend on it. Default: one per core.",
        at_least=1,
    )
    runner: Literal["local", "DirectRunner", "DataflowRunner"] = flag(
        "local",
        "Where the work runs. local: in processes on this machine. DirectRunner: with Apache Beam on this machine. "
        "DataflowRunner: with Apache Beam on Google Cloud. Install Beam with `python3 install.py --with beam`. The "
        "shards are the same.",
    )
    beam_options: str = flag(
        "",
        "Options for Apache Beam, quoted as one argument: --beam-options='--project=… --region=… "
        "--temp_location=gs://…'.",
        metavar="TEXT",
    )
    drop_duplicates: bool = flag(
        False,
        "Keep one copy of each document, even if it occurs in several sources: the copy in a validation split if "
        "there is one, otherwise the copy in a test split, otherwise the first. So the model is never trained on "
        "evaluation text. Texts are equal if they differ only in case, white space, or compatible forms of Unicode "
        "(NFKC). The corpus is read twice.",
    )
    overwrite: bool = flag(False, "Replace shards in --output-dir that were made with other settings.")
    push_to_hub: str | None = flag(
        None, "Also push the shards to this data set repository on the Hub.", metavar="USER/NAME", group="Hub"
    )
    hub_private: bool = flag(False, "Make the repository private when it is created.", group="Hub")
    hub_revision: str | None = flag(
        None, "Branch to push to. It is created if it does not exist. Default: main.", group="Hub"
    )
    publish_details: bool = flag(
        False,
        "Publish the paths of the corpus (files, folders and buckets) in manifest.json. Default: they are redacted.",
        group="Hub",
    )
    dry_run: bool = flag(
        False, "Check the flags, the folder and the beginning of the corpus, print the plan, and stop.", is_usual=True
    )
    verify: bool = flag(
        False,
        "Only check existing shards: read all shards in --output-dir, compare every record, row and sum with the "
        "manifests, and stop at the first difference. Writes nothing, and needs no other flag.",
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
            raise InputError(
                "--beam-options needs Apache Beam; received it with --runner local. Pass --runner DirectRunner or "
                "DataflowRunner."
            )
        if self.runner != DATAFLOW_RUNNER:
            return
        if open_folder(str(self.output_dir)).is_local:
            raise InputError(
                f"--runner {DATAFLOW_RUNNER} needs an --output-dir in gs://, because its machines cannot write "
                f"elsewhere; received {self.output_dir}."
            )
        if self.num_workers is not None:
            raise InputError(
                "--num-workers sets the number of processes on this machine, not of Dataflow's machines. Pass "
                f"--beam-options='--num_workers={self.num_workers} --max_num_workers=…' instead."
            )

    @property
    def num_processes(self) -> int:
        """Return `num_workers`, or the number of cores that this process may use."""
        return self.num_workers or num_cores()
