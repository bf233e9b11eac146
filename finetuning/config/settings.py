"""Settings of fine-tuning, and how they are parsed: those of pretraining, with defaults that suit a short run.

A name of transformers' `run_glue.py` and `run_classification.py` is the name of the flag here, or is read as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from finetuning.config.optimization import ClassOptimization, FinetuningOptimization, SmoothedOptimization
from mlm_common.cli.command_line import parse_arguments
from mlm_common.cli.settings import PUBLIC, Bounded, flag, flag_of, require
from mlm_common.corpus.csv_rows import parse_delimiter
from mlm_common.errors import InputError
from mlm_common.storage import check_file
from train.config.learning import ADDED, BATCH, CHECKPOINTS, PER_WORKER, ModelConfig, changeable, check_task_flag
from train.config.settings import HardwareConfig, HubConfig, RunConfig, RunSettings

# Where no rows decide: shorter ones are not worth a program; each bucket is twice as long as the one before.
SHORTEST_BUCKET = 16
# Tokens that two windows share by default in rows of 384 (BERT's).
DOC_STRIDE = 128
SIMILAR_LABELS = (
    "Labels that differ only in white space, case or the form of a whole number: merge them into one class, with the "
    "name of the most frequent one, or keep them apart. Without it, such labels are refused."
)
TPU_COMPILER = "TPU compiler"
KNOWN_CHOICES = "Default: by the columns of SWAG, RACE or COPA."


def fixed(value: Any = None, *marks: str) -> Any:
    """Make a setting of pretraining that is no flag here, since its value is the only one."""
    return field(init=False, default=value, metadata={"marks": marks})


@dataclass(frozen=True)
class ExamplesConfig(Bounded):
    """Where the examples come from, and how long their rows are."""

    FLAG_GROUP = "Data"

    train_file: str | None = changeable(
        None,
        "Training examples: .tsv, .csv, .jsonl (or .json), .parquet or .conll, local or gs://.",
        PER_WORKER,
        is_usual=True,
    )
    validation_file: str | None = changeable(
        None,
        "Examples for evaluation; they also decide which checkpoint is best. Without it nothing is evaluated.",
        PER_WORKER,
        is_usual=True,
    )
    test_file: str | None = changeable(None, "Examples to predict, with or without labels.", PER_WORKER)
    dataset_name: str | None = changeable(
        None,
        "Data set on the Hub, or a folder of one, instead of files. Its splits train, validation and test are used.",
        PUBLIC,
    )
    dataset_config_name: str | None = changeable(None, "Configuration of the data set.", PUBLIC)
    dataset_revision: str | None = changeable(None, "Commit or tag of the data set. Default: the newest.", PUBLIC)
    delimiter: str | None = changeable(
        None,
        "What is between the columns of .csv files: ',', ';', '|' or tab. Default: recognized by the first rows.",
        metavar="TEXT",
    )
    do_predict: bool = changeable(False, "Predict the test split; --test-file does so by itself.")
    tokenizer_name: str | None = changeable(
        None,
        "Folder or Hub id of the tokenizer. Its vocabulary must be the model's. Default: the tokenizer of --init-from.",
        PER_WORKER,
        metavar="DIR",
    )
    max_seq_length: int = flag(
        128,
        "Tokens of the longest row. Longer ones are cut; of a pair, the longer text first.",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    length_buckets: list[int] = flag(
        list,
        "Lengths to which rows are padded, such as 32 64 128; each is compiled once. Default: up to 8 that suit the "
        "training rows, and --max-seq-length; of embeddings 16, 32, 64 … up to it. With one length, all rows have it.",
        group=BATCH,
    )
    max_train_samples: int | None = flag(None, "Use only the first N training examples.", at_least=1)
    max_eval_samples: int | None = flag(None, "Use only the first N evaluation examples.", at_least=1)
    max_predict_samples: int | None = changeable(None, "Predict only the first N test examples.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        buckets = self.length_buckets
        is_right = sorted(set(buckets)) == buckets and all(length >= 1 for length in buckets)
        require(is_right, "must be increasing numbers of tokens", "--length-buckets", buckets)
        parse_delimiter(self.delimiter)
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
        return self.do_predict or self.test_file is not None

    def check_source(self, path: str, flag: str) -> None:
        """Check that the path exists which a flag such as --train-file names."""
        check_file(path, flag)


@dataclass(frozen=True)
class ClassificationData(ExamplesConfig):
    """Which texts have which labels."""

    task_name: Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"] | None = flag(
        None, "Task of GLUE, with its columns, labels and metrics, from --glue-dir or the Hub."
    )
    glue_dir: str | None = changeable(
        None, "Folder of the GLUE download, local or gs://, with CoLA/, SST-2/ … of .tsv files.", PER_WORKER
    )
    text_column_names: list[str] = flag(
        list, "One or two columns with the text. Default: all but the label's and id, idx or index."
    )
    label_column_name: str = flag("label", "Column with the labels.")
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = flag(
        None,
        "What a label is: one class; several, as a list or separated by --label-separator; or a number. Default: "
        "several if labels are lists, a number if all are numbers and not all whole, otherwise one class. Labels "
        "that could be read in two ways are refused.",
    )
    label_separator: str = flag(",", "Separates several labels of a row in one text.", metavar="TEXT")
    decimal_separator: Literal[".", ","] = flag(".", "Decimal point or comma of numbers.", ADDED)
    label_lists: Literal["names", "vectors"] | None = flag(
        None,
        "If labels are lists of 0 and 1 of one length: names (each is the name of a class) or vectors (one place "
        "per class). Without it, such labels are refused.",
        ADDED,
    )
    similar_labels: Literal["merge", "keep"] | None = flag(None, SIMILAR_LABELS, ADDED)
    metric_name: str | None = changeable(
        None,
        "Metric that decides which checkpoint is best. Default: the first one of the task; for GLUE, the mean of "
        "its metrics.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = {"--task-name": self.task_name, "--train-file": self.train_file, "--dataset-name": self.dataset_name}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} cannot be combined: each names the examples.")
        require(len(self.text_column_names) <= 2, "must be one or two", "--text-column-names", self.text_column_names)
        is_of_glue = self.glue_dir is None or self.task_name is not None
        require(is_of_glue, "needs --task-name", "--glue-dir", self.glue_dir)


@dataclass(frozen=True)
class TaggingData(ExamplesConfig):
    """Which words have which tags."""

    text_column_name: str = flag(
        "tokens", "Column with the words, a list per row. The first column of a .conll file has this name."
    )
    label_column_name: str = flag(
        "ner_tags", "Column with the tags, a list per row. The last column of a .conll file has this name."
    )
    similar_labels: Literal["merge", "keep"] | None = flag(None, SIMILAR_LABELS, ADDED)
    metric_name: str | None = changeable(
        None, "Metric that decides which checkpoint is best. Default: F1 of entities; for other tags, accuracy."
    )


@dataclass(frozen=True)
class QuestionData(ExamplesConfig):
    """Which questions about which paragraphs, and how an answer is chosen."""

    train_file: str | None = changeable(
        None,
        "Training questions: .json or .json.gz in SQuAD's format, or a .jsonl or .parquet file with the columns id, "
        "question, context and answers; local or gs://.",
        PER_WORKER,
        is_usual=True,
    )
    max_seq_length: int = flag(
        384,
        "Tokens of the longest row: a question and a window of its paragraph. BERT used 384.",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    doc_stride: int | None = flag(
        None,
        "Tokens by which two windows of a paragraph overlap, or differ: see --doc-stride-is. Default: 128, or a third "
        "of --max-seq-length if that is less.",
        group=BATCH,
        at_least=1,
    )
    doc_stride_is: Literal["overlap", "step"] = flag(
        "overlap",
        "Whether --doc-stride is the overlap, as in transformers' run_qa.py, or the step, as in Google's BERT.",
        group=BATCH,
    )
    n_best_size: int = changeable(
        20, "Tokens considered as start and as end of an answer; also how many answers are listed.", at_least=1
    )
    max_answer_length: int = changeable(30, "Tokens of the longest answer. BERT used 30.", at_least=1)
    null_score_diff_threshold: float = changeable(
        0.0,
        "For questions that may have no answer: answer with none if its score is higher than the best text's by "
        "more than X.",
    )

    @property
    def stride(self) -> int:
        return self.doc_stride or min(DOC_STRIDE, max(1, self.max_seq_length // 3))


@dataclass(frozen=True)
class CustomData(ExamplesConfig):
    """Which task, and what it reads: the files that are named, or whatever it finds by itself."""

    task: str | None = changeable(
        None,
        "The class of your task, a subclass of finetuning.tasks.custom.CustomTask, such as "
        "recipes/star_ratings.py:StarRatings. The code of this local file is run.",
        PER_WORKER,
        metavar="FILE.py:CLASS",
        is_usual=True,
    )
    metric_name: str | None = changeable(
        None, "Metric that decides which checkpoint is best. Default: the first one of the task."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_task_flag(self.task)


@dataclass(frozen=True)
class FinetunedModel(ModelConfig):
    """Which model is fine-tuned."""

    init_from: str | None = flag(
        None,
        "Model to start from: an export of this project, the folder of a run, or a folder or Hub id with "
        "config.json, tokenizer, and model.safetensors or tf_model.h5. It may have been fine-tuned before.",
        alias="model_name_or_path",
        metavar="DIR",
        is_usual=True,
    )
    preset: str = fixed("")
    objective: Literal["mlm", "mlm+nsp", "mlm+sop"] = fixed("mlm")
    grow: bool = fixed(False, ADDED)
    pretrained_model_config: str | None = fixed()
    position_init: Literal["random", "sinusoidal"] = fixed("random")
    block_attention: bool = fixed(False)
    pad_vocab_to_multiple_of: int = fixed(1)


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
    seed: int = flag(42, "Seed of the new head, the order of examples, and dropout.", at_least=0, below=2**31)
    seeds: list[int] = changeable(
        list,
        "Train once with each of these seeds, such as 1 2 3, in OUTPUT_DIR/seed-…, and compare their scores in a "
        "table.",
    )
    load_best_model_at_end: bool = changeable(
        True,
        "Export, score and predict with the best checkpoint. This is the default. Each new best is saved, "
        "whatever --save-steps says.",
        off_help="Export, score and predict with the last checkpoint.",
        group=CHECKPOINTS,
    )
    topology: str | None = changeable(
        None,
        "With --dry-run: ask the TPU's compiler, without a TPU, whether the step on the longest rows fits this "
        "slice (v3-8, v5e-8 …) and how fast it would be.",
        group=TPU_COMPILER,
    )
    compiler_python: str | None = changeable(
        None, "Python that has jax and libtpu, if it is not this one.", metavar="FILE", group=TPU_COMPILER
    )

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
    """All settings of one run of fine-tuning; each task has its class of `data`."""

    data: ExamplesConfig
    model: FinetunedModel
    optimization: FinetuningOptimization
    hardware: FinetuningHardware
    run: FinetuningRun
    hub: FinetuningHub

    def __post_init__(self) -> None:
        is_one = not self.run.seeds or self.hub.hub_model_id is None
        require(is_one, "cannot be combined with --hub-model-id, which takes one model", "--seeds", self.run.seeds)


@dataclass(frozen=True)
class ClassificationConfig(FinetuningConfig):
    """All settings of one run of classification."""

    data: ClassificationData
    optimization: ClassOptimization


@dataclass(frozen=True)
class TaggingConfig(FinetuningConfig):
    """All settings of one run of tagging."""

    data: TaggingData
    optimization: ClassOptimization


@dataclass(frozen=True)
class QuestionConfig(FinetuningConfig):
    """All settings of one run of question answering."""

    data: QuestionData


@dataclass(frozen=True)
class CustomConfig(FinetuningConfig):
    """All settings of one run of a custom task."""

    data: CustomData


@dataclass(frozen=True)
class ChoiceData(ExamplesConfig):
    """Which texts are chosen from, and which of them is right."""

    context_column_name: str | None = flag(None, f"Column with the text before every choice. {KNOWN_CHOICES}")
    question_column_name: str | None = flag(
        None,
        f"Column with the beginning of every choice, such as a question; where it has a blank, _, a choice fills it. "
        f"{KNOWN_CHOICES} Of other columns, choices stand alone.",
    )
    choice_column_names: list[str] = flag(
        list, f"Columns with the choices: one for each, or one with lists of them. {KNOWN_CHOICES}"
    )
    label_column_name: str | None = flag(
        None,
        "Column with the right choice: its number from 0, its letter, or the name of its column. Default: label, or "
        "answer as in RACE.",
    )
    metric_name: str | None = changeable(
        None, "Metric that decides which checkpoint is best: accuracy or loss. Default: accuracy."
    )


@dataclass(frozen=True)
class ChoiceConfig(FinetuningConfig):
    """All settings of one run of multiple choice."""

    data: ChoiceData
    optimization: SmoothedOptimization


Settings = TypeVar("Settings", bound=FinetuningConfig)


def parse_finetuning_config(config_class: type[Settings], argv: Sequence[str] | None, description: str) -> Settings:
    """Read the settings of a task given on the command line, over `--config-file` and the defaults."""
    subjects = config_class.subjects()
    source = "task" if hasattr(subjects["data"], "task") else "train_file"
    needed = ("init_from", source, "output_dir")
    parsed: tuple[Any, ...] = parse_arguments(tuple(subjects.values()), argv, description, needed=needed)
    config = config_class(**dict(zip(subjects, parsed, strict=True)))
    require(bool(config.model.init_from), "is required: the model to start from", "--init-from", "nothing")
    require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    if isinstance(config.data, CustomData):
        require(bool(config.data.task), "is required: FILE.py:CLASS, the task", "--task", "nothing")
    else:  # a custom task may read a folder, or nothing, by these names
        for name in ("train_file", "validation_file", "test_file"):
            if (path := getattr(config.data, name)) is not None:
                config.data.check_source(path, flag_of(name))
    return config
