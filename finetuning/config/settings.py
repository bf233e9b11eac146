"""Settings of fine-tuning: those of pretraining where they are the same, with the defaults that suit a short run.

A name of transformers' `run_glue.py` and `run_classification.py` is the name of the flag here, or is read as well.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from mlm_common.settings import PUBLIC, flag, require, require_each
from train.config.settings import (
    ADDED,
    PER_WORKER,
    ROUNDING,
    HardwareConfig,
    HubConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    RunSettings,
    changeable,
)

# The shortest rows that are worth a program of their own; each bucket is twice as long as the one before.
SHORTEST_BUCKET = 16
# Tokens that two windows share by default in rows of 384 (BERT's).
DOC_STRIDE = 128
SIMILAR_LABELS = (
    "Make labels that differ in white space, case or the form of a whole number alone one class, called by the most "
    "frequent of them, or keep them apart. Without it, they are refused."
)


def fixed(value: Any = None) -> Any:
    """Make a setting of pretraining that is no flag here, since its value is the only one."""
    return field(init=False, default=value, metadata={"marks": ()})


@dataclass(frozen=True)
class ExamplesConfig:
    """Where the examples come from, and how long their rows are."""

    train_file: str | None = changeable(
        None, "Examples to train on: .tsv, .csv, .jsonl (or .json), .parquet or .conll, local or gs://.", PER_WORKER
    )
    validation_file: str | None = changeable(
        None, "Examples to evaluate on, by which the best checkpoint is chosen; without it nothing is.", PER_WORKER
    )
    test_file: str | None = changeable(None, "Examples to predict, with or without labels.", PER_WORKER)
    dataset_name: str | None = changeable(
        None,
        "Data set of the Hub, or of a folder, in the place of files: its splits train, validation and test.",
        PUBLIC,
    )
    dataset_config_name: str | None = changeable(None, "Its configuration.", PUBLIC)
    dataset_revision: str | None = changeable(None, "Its commit or tag; by default the newest.", PUBLIC)
    do_predict: bool = changeable(False, "Predict the test part, which --test-file asks for by itself.")
    tokenizer_name: str | None = changeable(
        None,
        "Folder or Hub id of the tokenizer; by default that of --init-from, whose vocabulary it must have.",
        PER_WORKER,
    )
    max_seq_length: int = flag(128, "Tokens of the longest row; longer ones are cut, of a pair the longer text first.")
    length_buckets: list[int] = flag(
        list,
        "Lengths that rows are filled up to, each a program compiled once; by default 16, 32, 64 … up to "
        "--max-seq-length. One length fills all rows up to it.",
    )
    max_train_samples: int | None = flag(None, "Train on so many examples, the first.")
    max_eval_samples: int | None = flag(None, "Evaluate on so many examples, the first.")
    max_predict_samples: int | None = changeable(None, "Predict so many examples, the first.")

    def __post_init__(self) -> None:
        counts = "max_seq_length max_train_samples max_eval_samples max_predict_samples"
        require_each(self, counts, lambda value: value >= 1, "must be at least 1")
        buckets = self.length_buckets
        is_right = sorted(set(buckets)) == buckets and all(length >= 1 for length in buckets)
        require(is_right, "must be growing numbers of tokens", "--length-buckets", buckets)
        reaches = not buckets or buckets[-1] == self.max_seq_length
        require(reaches, f"must end with --max-seq-length {self.max_seq_length}", "--length-buckets", buckets)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of rows, in tokens, in ascending order."""
        if self.length_buckets:
            return tuple(self.length_buckets)
        doubled = [SHORTEST_BUCKET << power for power in range(self.max_seq_length.bit_length())]
        return (*(length for length in doubled if length < self.max_seq_length), self.max_seq_length)

    @property
    def predicts(self) -> bool:
        """Whether the test part is predicted."""
        return self.do_predict or self.test_file is not None


@dataclass(frozen=True)
class ClassificationData(ExamplesConfig):
    """Which texts have which labels."""

    task_name: Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"] | None = flag(
        None, "A task of GLUE, from --glue-dir, else from the Hub; it brings columns, labels and metrics."
    )
    glue_dir: str | None = changeable(
        None, "Folder of the GLUE download, local or gs://, with CoLA/, SST-2/ … of .tsv files.", PER_WORKER
    )
    text_column_names: list[str] = flag(
        list, "One or two columns of text; by default those besides the label's, and what is called id, idx or index."
    )
    label_column_name: str = flag("label", "Column of the labels.")
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = flag(
        None,
        "What a label is: one of some; several, as a list or divided by --label-separator; a number. By default "
        "several where they are lists, a number where all are numbers and not all whole, else one; labels that can be "
        "read in two ways are refused.",
    )
    label_separator: str = flag(",", "What divides several labels of a row, where they are one text.")
    decimal_separator: Literal[".", ","] = flag(".", "Decimal point or comma of numbers.", ADDED)
    label_lists: Literal["names", "vectors"] | None = flag(
        None,
        "What lists of 0 and 1 of one length are: the names of a row's classes, or a place for each class. Without it, "
        "such labels are refused.",
        ADDED,
    )
    similar_labels: Literal["merge", "keep"] | None = flag(None, SIMILAR_LABELS, ADDED)
    metric_name: str | None = changeable(
        None, "Metric by which the best checkpoint is chosen; by default the first of the task's, for GLUE their mean."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = {
            "--task-name": self.task_name,
            "--train-file": self.train_file,
            "--dataset-name": self.dataset_name,
        }
        given = [name for name, value in sources.items() if value is not None]
        require(len(given) <= 1, "must not both be given", " and ".join(given), "both")
        require(len(self.text_column_names) <= 2, "must be one or two", "--text-column-names", self.text_column_names)
        is_of_glue = self.glue_dir is None or self.task_name is not None
        require(is_of_glue, "needs --task-name", "--glue-dir", self.glue_dir)


@dataclass(frozen=True)
class TaggingData(ExamplesConfig):
    """Which words have which tags."""

    text_column_name: str = flag("tokens", "Column of the words, a list a row; a .conll file's first is called so.")
    label_column_name: str = flag("ner_tags", "Column of their tags, likewise; a .conll file's last is called so.")
    similar_labels: Literal["merge", "keep"] | None = flag(None, SIMILAR_LABELS, ADDED)
    metric_name: str | None = changeable(
        None,
        "Metric by which the best checkpoint is chosen; by default the F1 of entities, of other tags the accuracy.",
    )


@dataclass(frozen=True)
class QuestionData(ExamplesConfig):
    """Which questions about which paragraphs, and how an answer is chosen."""

    max_seq_length: int = flag(384, "Tokens of the longest row: a question and a window of its paragraph (BERT's 384).")
    doc_stride: int | None = flag(
        None,
        "Tokens that two windows of a paragraph share, or by which they differ. Default: 128, or a third of "
        "--max-seq-length where that is less.",
    )
    doc_stride_is: Literal["overlap", "step"] = flag(
        "overlap", "Whether --doc-stride is the overlap, as in transformers' script, or the step, as in Google's."
    )
    n_best_size: int = changeable(20, "Tokens at which an answer may begin, and end; answers that are listed.")
    max_answer_length: int = changeable(30, "Tokens of the longest answer (BERT's 30).")
    null_score_diff_threshold: float = changeable(
        0.0,
        "Where some questions have no answer: none is given if its score is higher than a text's by more than this.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = "doc_stride n_best_size max_answer_length"
        require_each(self, counts, lambda value: value >= 1, "must be at least 1")

    @property
    def stride(self) -> int:
        """`doc_stride`, or its default."""
        return self.doc_stride or min(DOC_STRIDE, max(1, self.max_seq_length // 3))


@dataclass(frozen=True)
class OwnData(ExamplesConfig):
    """Which task, and what it reads: the files that are named, or whatever it finds by itself."""

    task: str | None = changeable(
        None,
        "FILE.py:CLASS, a task of your own: a subclass of finetuning.tasks.own.OwnTask, as recipes/star_ratings.py has "
        "one. The code of this local file is run, and no other that is not installed.",
        PER_WORKER,
    )
    metric_name: str | None = changeable(
        None, "Metric by which the best checkpoint is chosen; by default the first of the task's."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        file, _, name = (self.task or "task.py:Task").rpartition(":")
        is_right = file.endswith(".py") and name.isidentifier()
        require(is_right, "must be FILE.py:CLASS, a local file and a class in it", "--task", self.task)


@dataclass(frozen=True)
class FinetunedModel(ModelConfig):
    """Which model is fine-tuned."""

    init_from: str | None = flag(
        None,
        "What to start from: an export of this project, a run's folder, a folder or Hub id with config.json, "
        "tokenizer, and weights in safetensors or TensorFlow's h5; also a model that was fine-tuned before.",
        former_name="model_name_or_path",
    )
    preset: str = fixed("")
    objective: Literal["mlm", "mlm+nsp", "mlm+sop"] = fixed("mlm")
    pretrained_model_config: str | None = fixed()
    position_init: Literal["random", "sinusoidal"] = fixed("random")
    block_attention: bool = fixed(False)
    pad_vocab_to_multiple_of: int = fixed(1)


@dataclass(frozen=True)
class FinetuningOptimization(OptimizationConfig):
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: int = changeable(
        32, "Rows a replica takes at once (BERT's 32).", ROUNDING, former_name="per_device_train_batch_size"
    )
    num_epochs: int = changeable(3, "Passes over the examples (BERT's 3).", former_name="num_train_epochs")
    learning_rate: float = flag(2e-5, "Peak, after the warmup; BERT's are 5e-5, 3e-5 and 2e-5.")
    warmup_ratio: float = flag(0.1, "Share of the steps over which the rate rises from 0 (BERT's 0.1).")
    weight_decay_rate: float = flag(
        0.01, "Decoupled; not on biases and layer norms (BERT's 0.01).", former_name="weight_decay"
    )
    adam_beta2: float = flag(0.999, "Decay of the second moment (BERT's 0.999).")


@dataclass(frozen=True)
class FinetuningHardware(HardwareConfig):
    """What the run computes on; a call from Python makes one step, since the next may have another length."""

    steps_per_execution: int | None = fixed()

    @property
    def max_steps_per_execution(self) -> int:
        """Steps that one call from Python may make."""
        return 1


@dataclass(frozen=True)
class FinetuningRun(RunConfig):
    """Where the run writes, how often, and its seed."""

    phases: str | None = fixed()
    seed: int = flag(42, "Fixes the start of the head, the order of examples, and dropout.")
    seeds: list[int] = changeable(
        list, "Make a run with each of these seeds, in OUTPUT_DIR/seed-…, and a table of their scores: 1 2 3."
    )
    load_best_model_at_end: bool = changeable(
        True,
        "Export, score and predict with the checkpoint of the best evaluation, not with the last. Each evaluation that "
        "is the best so far is saved, whatever --save-steps.",
    )
    topology: str | None = changeable(
        None,
        "With --dry-run: ask the TPU's compiler, without a TPU, whether the step on the longest rows fits this slice, "
        "and how fast it would be: v3-8, v5e-8 … (docs/tpu/preflight.md).",
    )
    compiler_python: str | None = changeable(None, "Interpreter that has jax and libtpu for that, where not this one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dry_run or self.topology is None, "needs --dry-run", "--topology", self.topology)
        require(len(set(self.seeds)) == len(self.seeds), "must differ", "--seeds", self.seeds)


@dataclass(frozen=True)
class FinetuningHub(HubConfig):
    """Where the export is pushed to, how often, and what its card says that the run does not know."""

    hub_example: str = fixed("[MASK]")


@dataclass(frozen=True)
class FinetuningConfig(RunSettings):
    """All settings of one run of fine-tuning; those of a task name its own `data`."""

    data: ExamplesConfig
    model: FinetunedModel
    optimization: FinetuningOptimization
    hardware: FinetuningHardware
    run: FinetuningRun
    hub: FinetuningHub

    def __post_init__(self) -> None:
        is_one = not self.run.seeds or self.hub.hub_model_id is None
        require(is_one, "must not be given with --hub-model-id, which is of one model", "--seeds", self.run.seeds)


@dataclass(frozen=True)
class ClassificationConfig(FinetuningConfig):
    """All settings of one run of classification."""

    data: ClassificationData


@dataclass(frozen=True)
class TaggingConfig(FinetuningConfig):
    """All settings of one run of tagging."""

    data: TaggingData


@dataclass(frozen=True)
class QuestionConfig(FinetuningConfig):
    """All settings of one run of question answering."""

    data: QuestionData


@dataclass(frozen=True)
class OwnConfig(FinetuningConfig):
    """All settings of one run of a task of one's own."""

    data: OwnData
