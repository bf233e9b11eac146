"""Settings of fine-tuning, which extend the settings of pretraining with defaults for short runs; and their parser.

Flags of transformers' `run_glue.py` and `run_classification.py` have the same names here, or are accepted as aliases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from finetuning.config.optimization import ClassOptimization, FinetuningOptimization, SmoothedOptimization
from mlm_common.cli.command_line import parse_arguments
from mlm_common.cli.settings import Bounded, Public, flag, flag_of, require
from mlm_common.corpus.csv_rows import parse_delimiter
from mlm_common.errors import InputError
from mlm_common.storage import check_file
from train.config import Added, Changeable, PerWorker
from train.config.learning import BATCH, CHECKPOINTS, ModelConfig, check_task_flag
from train.config.settings import MASK, HardwareConfig, HubConfig, RunConfig, RunSettings

# Length in tokens of the shortest default bucket; each further bucket is twice as long. Compiling a program for shorter
# rows would cost more time than the program saves.
SHORTEST_BUCKET = 16
# Default number of tokens by which two windows overlap in rows of 384 tokens, as in BERT.
DOC_STRIDE = 128
SIMILAR_LABELS = (
    "Labels that differ only in white space, case or the form of a whole number: merge them into one class, named "
    "after the most frequent one, or keep them apart. Default: such labels are an error."
)
TPU_COMPILER = "TPU compiler"
KNOWN_CHOICES = "Default: detected from the columns of SWAG, RACE or COPA."
# Settings of pretraining in the records of fine-tuning runs. Their fingerprints contain all of these settings except
# `grow`.
RECORDED: dict[str, dict[str, Any]] = {
    "model": {
        "preset": "", "pretrained_model_config": None, "grow": False, "objective": "mlm", "position_init": "random",
        "block_attention": False, "pad_vocab_to_multiple_of": 1,
    },
    "hardware": {"steps_per_execution": None},
    "run": {"phases": None},
    "hub": {"hub_example": MASK},
}  # fmt: skip


@dataclass(frozen=True)
class ExamplesConfig(Bounded):
    """Where the examples come from, and the lengths of their rows."""

    FLAG_GROUP = "Data"

    train_file: PerWorker[str | None] = flag(
        None,
        "Training examples: .tsv, .csv, .jsonl (or .json), .parquet or .conll, local or gs://.",
        is_usual=True,
    )
    validation_file: PerWorker[str | None] = flag(
        None,
        "Examples for evaluation; they also decide which checkpoint is best. Without them, nothing is evaluated.",
        is_usual=True,
    )
    test_file: PerWorker[str | None] = flag(None, "Examples to make predictions for, with or without labels.")
    dataset_name: Changeable[Public[str | None]] = flag(
        None,
        "Data set on the Hub, or a local folder with a data set, instead of files. Its splits train, validation and "
        "test are used.",
    )
    dataset_config_name: Changeable[Public[str | None]] = flag(None, "Configuration of the data set.")
    dataset_revision: Changeable[Public[str | None]] = flag(None, "Commit or tag of the data set. Default: the newest.")
    delimiter: Changeable[str | None] = flag(
        None,
        "Character between the columns of .csv files: ',', ';', '|' or tab. Default: detected from the first rows.",
        metavar="TEXT",
    )
    do_predict: Changeable[bool] = flag(False, "Predict the test split. With --test-file it is always predicted.")
    tokenizer_name: PerWorker[str | None] = flag(
        None,
        "Folder or Hub id of the tokenizer. Its vocabulary must be the model's. Default: the tokenizer of --init-from.",
        metavar="DIR",
    )
    max_seq_length: int = flag(
        128,
        "Maximum number of tokens per row. Longer rows are cut; in a pair, the longer text is cut first.",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    length_buckets: list[int] = flag(
        list,
        "Lengths to which rows are padded, such as 32 64 128; the step is compiled once for each. Default: up to 8 "
        "lengths that suit the training rows, and --max-seq-length; for embeddings 16, 32, 64 … up to "
        "--max-seq-length.",
        group=BATCH,
    )
    max_train_samples: int | None = flag(None, "Use only the first N training examples.", at_least=1)
    max_eval_samples: int | None = flag(None, "Use only the first N evaluation examples.", at_least=1)
    max_predict_samples: Changeable[int | None] = flag(None, "Predict only the first N test examples.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        buckets = self.length_buckets
        is_valid = sorted(set(buckets)) == buckets and all(length >= 1 for length in buckets)
        require(is_valid, "must be increasing numbers of tokens", "--length-buckets", buckets)
        parse_delimiter(self.delimiter)
        ends_right = not buckets or buckets[-1] == self.max_seq_length
        require(ends_right, f"must end with --max-seq-length {self.max_seq_length}", "--length-buckets", buckets)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to which rows may be padded, in tokens, in ascending order."""
        if self.length_buckets:
            return tuple(self.length_buckets)
        doubled = [SHORTEST_BUCKET << power for power in range(self.max_seq_length.bit_length())]
        return (*(length for length in doubled if length < self.max_seq_length), self.max_seq_length)

    @property
    def predicts(self) -> bool:
        """Whether the run predicts a test split."""
        return self.do_predict or self.test_file is not None

    def check_source(self, path: str, flag: str) -> None:
        """Check that the file that was given with `flag`, such as --train-file, exists."""
        check_file(path, flag)


@dataclass(frozen=True)
class ClassificationData(ExamplesConfig):
    """The texts to classify, and how to read labels."""

    task_name: Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"] | None = flag(
        None, "Task of GLUE, with its columns, labels and metrics, from --glue-dir or the Hub."
    )
    glue_dir: PerWorker[str | None] = flag(
        None, "Folder of the GLUE download, local or gs://, with .tsv files in CoLA/, SST-2/ …"
    )
    text_column_names: list[str] = flag(
        list, "One or two columns with the text. Default: all but --label-column-name and id, idx or index."
    )
    label_column_name: str = flag("label", "Column with the labels.")
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = flag(
        None,
        "What a label is: one class; several classes, as a list or separated by --label-separator; or a number. "
        "Default: several classes if labels are lists, a number if all are numbers and not all are whole, otherwise "
        "one class. Ambiguous labels are an error.",
    )
    label_separator: str = flag(",", "Text between the labels of a row that has several.", metavar="TEXT")
    decimal_separator: Added[Literal[".", ","]] = flag(".", "Decimal point or comma of numbers.")
    label_lists: Added[Literal["names", "vectors"] | None] = flag(
        None,
        "How to read labels that are lists of 0 and 1, all of the same length: names (0 and 1 are the names of "
        "classes) or vectors (the list has an entry for each class). Default: such labels are an error.",
    )
    similar_labels: Added[Literal["merge", "keep"] | None] = flag(None, SIMILAR_LABELS)
    metric_name: Changeable[str | None] = flag(
        None,
        "Metric that decides which checkpoint is best. Default: the first metric of the task; for GLUE, the mean of "
        "its metrics.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = {"--task-name": self.task_name, "--train-file": self.train_file, "--dataset-name": self.dataset_name}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} cannot be combined, because each names the examples.")
        require(len(self.text_column_names) <= 2, "must be one or two", "--text-column-names", self.text_column_names)
        has_task = self.glue_dir is None or self.task_name is not None
        require(has_task, "needs --task-name", "--glue-dir", self.glue_dir)


@dataclass(frozen=True)
class TaggingData(ExamplesConfig):
    """The words to tag, and how to read tags."""

    text_column_name: str = flag(
        "tokens", "Column with the words, a list per row. In a .conll file, tokens is the first column."
    )
    label_column_name: str = flag(
        "ner_tags", "Column with the tags, a list per row. In a .conll file, ner_tags is the last column."
    )
    similar_labels: Added[Literal["merge", "keep"] | None] = flag(None, SIMILAR_LABELS)
    metric_name: Changeable[str | None] = flag(
        None, "Metric that decides which checkpoint is best. Default: F1 of entities; without entities, accuracy."
    )


@dataclass(frozen=True)
class QuestionData(ExamplesConfig):
    """The questions to answer, their paragraphs, and how to choose an answer."""

    train_file: PerWorker[str | None] = flag(
        None,
        "Training questions: .json or .json.gz in SQuAD's format, or a .jsonl or .parquet file with the columns id, "
        "question, context and answers; local or gs://.",
        is_usual=True,
    )
    max_seq_length: int = flag(
        384,
        "Maximum number of tokens per row, which holds a question and a window of its paragraph. BERT used 384.",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    doc_stride: int | None = flag(
        None,
        "Number of tokens by which two windows of a paragraph overlap, or by which the second one starts later; see "
        "--doc-stride-is. Default: 128, or a third of --max-seq-length if that is less.",
        group=BATCH,
        at_least=1,
    )
    doc_stride_is: Literal["overlap", "step"] = flag(
        "overlap",
        "Whether --doc-stride is the overlap of two windows, as in transformers' run_qa.py, or the step from one to "
        "the next, as in Google's BERT.",
        group=BATCH,
    )
    n_best_size: Changeable[int] = flag(
        20,
        "Number of tokens to consider as the start, and as the end, of an answer. Also the number of answers that are "
        "listed.",
        at_least=1,
    )
    max_answer_length: Changeable[int] = flag(30, "Maximum number of tokens of an answer. BERT used 30.", at_least=1)
    null_score_diff_threshold: Changeable[float] = flag(
        0.0,
        'For questions that may have no answer: choose "no answer" if its score exceeds that of the best answer by '
        "more than X.",
    )

    @property
    def stride(self) -> int:
        """`--doc-stride`, or its default."""
        return self.doc_stride or min(DOC_STRIDE, max(1, self.max_seq_length // 3))


@dataclass(frozen=True)
class CustomData(ExamplesConfig):
    """The custom task to train, and the files that it reads. A task may also obtain examples in another way."""

    task: PerWorker[str | None] = flag(
        None,
        "The class of your task, a subclass of finetuning.tasks.custom.CustomTask, such as "
        "recipes/star_ratings.py:StarRatings. The code of this local file is executed.",
        metavar="FILE.py:CLASS",
        is_usual=True,
    )
    metric_name: Changeable[str | None] = flag(
        None, "Metric that decides which checkpoint is best. Default: the first metric of the task."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_task_flag(self.task)


@dataclass(frozen=True)
class FinetunedModel(ModelConfig):
    """The model to fine-tune."""

    init_from: str | None = flag(
        None,
        "Model to start from: an export of this project, the folder of a run, or a folder or Hub id with "
        "config.json, tokenizer, and model.safetensors or tf_model.h5. It may already be fine-tuned.",
        alias="model_name_or_path",
        metavar="DIR",
        is_usual=True,
    )


@dataclass(frozen=True)
class FinetuningRun(RunConfig):
    """Where and how often the run writes, and its seed."""

    seed: int = flag(42, "Seed of the new head, the order of examples, and dropout.", at_least=0, below=2**31)
    seeds: Changeable[list[int]] = flag(
        list,
        "Train once with each of these seeds, such as 1 2 3, in OUTPUT_DIR/seed-…, and print a table that compares "
        "their scores.",
    )
    load_best_model_at_end: Changeable[bool] = flag(
        True,
        "Export, score and predict with the best checkpoint. This is the default. Each new best checkpoint is saved, "
        "regardless of --save-steps.",
        off_help="Export, score and predict with the last checkpoint.",
        group=CHECKPOINTS,
    )
    topology: Changeable[str | None] = flag(
        None,
        "With --dry-run: compile the step on the longest rows for this slice (v3-8, v5e-8 …), without a TPU, and "
        "report whether it fits into memory and how fast it would be.",
        group=TPU_COMPILER,
    )
    compiler_python: Changeable[str | None] = flag(
        None,
        "Python interpreter that has jax and libtpu. Default: the one that runs this command.",
        metavar="FILE",
        group=TPU_COMPILER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dry_run or self.topology is None, "needs --dry-run", "--topology", self.topology)
        require(len(set(self.seeds)) == len(self.seeds), "must differ", "--seeds", self.seeds)


@dataclass(frozen=True)
class FinetuningConfig(RunSettings):
    """All settings of a fine-tuning run. Each task has a subclass, whose `data` is of a class for that task."""

    data: ExamplesConfig
    model: FinetunedModel
    optimization: FinetuningOptimization
    hardware: HardwareConfig
    run: FinetuningRun
    hub: HubConfig

    def __post_init__(self) -> None:
        has_one_model = not self.run.seeds or self.hub.hub_model_id is None
        rule = "cannot be combined with --hub-model-id, which names the repository of one model"
        require(has_one_model, rule, "--seeds", self.run.seeds)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {subject: values | RECORDED.get(subject, {}) for subject, values in super().as_dict().items()}

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in super().identity().items() if name != "model.grow"}


@dataclass(frozen=True)
class ClassificationConfig(FinetuningConfig):
    """All settings of a classification run."""

    data: ClassificationData
    optimization: ClassOptimization


@dataclass(frozen=True)
class TaggingConfig(FinetuningConfig):
    """All settings of a tagging run."""

    data: TaggingData
    optimization: ClassOptimization


@dataclass(frozen=True)
class QuestionConfig(FinetuningConfig):
    """All settings of a question answering run."""

    data: QuestionData


@dataclass(frozen=True)
class CustomConfig(FinetuningConfig):
    """All settings of a run of a custom task."""

    data: CustomData


@dataclass(frozen=True)
class ChoiceData(ExamplesConfig):
    """The texts to choose from, and how to read the label of the right text."""

    context_column_name: str | None = flag(None, f"Column with the text before every choice. {KNOWN_CHOICES}")
    question_column_name: str | None = flag(
        None,
        "Column with the beginning of every choice, such as a question. If the beginning contains a blank, written as "
        f"_, each choice replaces the blank. {KNOWN_CHOICES} With other columns, choices have no beginning.",
    )
    choice_column_names: list[str] = flag(
        list, f"Columns with the choices: one column per choice, or one column of lists. {KNOWN_CHOICES}"
    )
    label_column_name: str | None = flag(
        None,
        "Column with the right choice, given as its number from 0, its letter, or the name of its column. Default: "
        "`label`, or `answer` for data in RACE's format.",
    )
    metric_name: Changeable[str | None] = flag(
        None, "Metric that decides which checkpoint is best: accuracy or loss. Default: accuracy."
    )


@dataclass(frozen=True)
class ChoiceConfig(FinetuningConfig):
    """All settings of a multiple choice run."""

    data: ChoiceData
    optimization: SmoothedOptimization


Settings = TypeVar("Settings", bound=FinetuningConfig)


def parse_finetuning_config(config_class: type[Settings], argv: Sequence[str] | None, description: str) -> Settings:
    """Parse the command line of a task. The command line overrides `--config-file`, which overrides the defaults.

    Raises:
        InputError: a setting is invalid or missing, or a file does not exist.
    """
    subjects = config_class.subjects()
    source = "task" if hasattr(subjects["data"], "task") else "train_file"
    needed = ("init_from", source, "output_dir")
    parsed: tuple[Any, ...] = parse_arguments(tuple(subjects.values()), argv, description, needed=needed)
    config = config_class(**dict(zip(subjects, parsed, strict=True)))
    require(bool(config.model.init_from), "is required: the model to start from", "--init-from", "nothing")
    require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    if isinstance(config.data, CustomData):
        require(bool(config.data.task), "is required: FILE.py:CLASS, the task", "--task", "nothing")
    else:  # for a custom task, these flags may name folders, or anything else
        for name in ("train_file", "validation_file", "test_file"):
            if (path := getattr(config.data, name)) is not None:
                config.data.check_source(path, flag_of(name))
    return config
