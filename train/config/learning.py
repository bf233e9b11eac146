"""Settings of what is learned: data, model, masks, optimizer. Each field is a flag of `run_mlm.py`."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from mlm_common.cli.settings import PUBLIC, Bounded, flag, flag_of, require
from mlm_common.mixture import named_folders
from train.config.presets import DEFAULT_BATCH_ROWS, presets_by_size

# Marks of a setting. A resumed run may be given another value; each worker of a run may; another value changes how sums
# are rounded, and nothing else; runs of before it was added have its default.
MAY_CHANGE, PER_WORKER, ROUNDING, ADDED = "may_change", "per_worker", "rounding", "added"
# The fraction of the tokens that evaluation masks, whatever training does, so that any two runs compare.
EVALUATION_MLM_PROBABILITY = 0.15
# Groups of `--help` that settings of several dataclasses are in.
MODEL, MIXTURE, BATCH, EVALUATION, CHECKPOINTS, FAULTS = (
    "Model",
    "Mixture of sources",
    "Batch and length",
    "Evaluation and logging",
    "Checkpoints and resuming",
    "Fault tolerance",
)

# Three ways to say how often each source of a mixture is read.
SOURCE_SETTINGS = ("source_weights", "sampling_alpha", "source_passes")


def changeable(default: Any, help_text: str, *marks: str, **shown: Any) -> Any:
    """Make a flag whose value may change when a run resumes; `shown` goes to `mlm_common.cli.settings.flag`."""
    return flag(default, help_text, MAY_CHANGE, *marks, **shown)


@dataclass(frozen=True)
class DataConfig(Bounded):
    """Where the rows come from; length, vocabulary and special ids are read from the shards' manifest."""

    FLAG_GROUP = "Data"

    train_dataset: str | None = changeable(
        None,
        "Folder of training shards, local or gs://: OUTPUT_DIR/train of prepare_tfrecord_shards.py. From the Hub: "
        "hub:USER/NAME[/FOLDER][@REVISION]. For a mixture: OUTPUT_DIR of prepare_tfrecord_shards.py --sources, or "
        "several folders, NAME=DIR NAME=DIR …",
        PER_WORKER,
        metavar="DIR",
        is_usual=True,
        takes_several=True,
    )
    eval_dataset: str | None = changeable(
        None,
        "Folder of validation shards, as for --train-dataset. Without it nothing is evaluated.",
        PER_WORKER,
        metavar="DIR",
        is_usual=True,
        takes_several=True,
    )
    source_weights: list[str] = changeable(
        list,
        "Fraction of the rows that comes from each source, NAME=X NAME=X …; the sum is 1. Default: the weights of the "
        "mixture; if it has none, in proportion to the rows of the sources.",
        metavar="NAME=X",
        group=MIXTURE,
    )
    sampling_alpha: float | None = changeable(
        None,
        "Instead of --source-weights: in proportion to tokens^X. Below 1, small sources are read more often than "
        "large ones; XLM-R used 0.3.",
        group=MIXTURE,
        at_least=0,
        at_most=1,
    )
    source_passes: list[str] = changeable(
        list,
        "Instead of --source-weights: how often each source is read in an epoch, NAME=X NAME=X …",
        metavar="NAME=X",
        group=MIXTURE,
    )
    max_passes: float = changeable(10.0, "Warn if a run reads a source more than X times.", group=MIXTURE, above=0)
    metric_for_best: str = changeable(
        "loss",
        "Loss that decides which checkpoint is best: loss, the weighted mean over the sources, or eval_loss_NAME, "
        "that of one source.",
        PUBLIC,
        metavar="NAME",
        group=EVALUATION,
    )
    tokenizer: str | None = changeable(
        None,
        "Folder or Hub id of the tokenizer. Default: the one saved with the training shards.",
        PER_WORKER,
        metavar="DIR",
    )
    max_length: int | None = changeable(
        None, "Tokens per row. Default: that of the shards; another value is an error.", group=BATCH
    )
    score_pairs: str | None = changeable(
        None,
        "At each evaluation also score minimal pairs of this file in BLiMP's form (lines of JSON, also .gz), at most "
        "400 of them, as `pairs_accuracy`.",
        metavar="FILE",
        group=EVALUATION,
    )
    score_words: int = changeable(
        0,
        "At each evaluation also score N words of the validation shards, masked token by token (`bits_per_byte`) and "
        "as a whole (`word_accuracy`).",
        group=EVALUATION,
        at_least=0,
    )
    save_at_words: list[str] = changeable(
        list,
        "Keep the checkpoints after these numbers of words, such as 1M 2M 10M, export them to OUTPUT_DIR/words/chck_1M "
        "…, and with --hub-model-id push them to branches of these names.",
        group=CHECKPOINTS,
        metavar="WORDS",
    )
    task: str | None = changeable(
        None,
        "Instead of --objective: the class of your task, a subclass of train.tasks.task.PretrainingTask, such as "
        "recipes/replaced_tokens.py:ReplacedTokens. The code of this local file is run.",
        PER_WORKER,
        metavar="FILE.py:CLASS",
        group=MODEL,
    )
    shuffle_buffer_size: int = flag(
        2**15,
        "Rows held in memory and shuffled together. Whole shards are shuffled first, so it need not be large.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_task_flag(self.task)
        require(
            not self.is_scored or bool(self.eval_dataset), "needs --eval-dataset", "--score-pairs or -words", "none"
        )
        for text in self.save_at_words:
            rule = "must be numbers of words, such as 500K 1M 10M"
            require(WORDS.fullmatch(text) is not None, rule, "--save-at-words", text)
        given = [flag_of(name) for name in SOURCE_SETTINGS if getattr(self, name) not in (None, [])]
        require(len(given) <= 1, "must not be given together", " and ".join(given), "several weights for each source")

    @property
    def is_scored(self) -> bool:
        return bool(self.score_pairs or self.score_words)

    def folders(self) -> dict[str, str]:
        """Map flags, with the names of sources, to the folders of shards."""
        folders = {}
        for flag_name, text in (("--train-dataset", self.train_dataset), ("--eval-dataset", self.eval_dataset)):
            for name, folder in named_folders(text, flag_name).items() if text else ():
                folders[f"{flag_name} {name}".rstrip()] = folder
        return folders


def check_task_flag(task: str | None) -> None:
    """Raise InputError where `--task` is given and is not FILE.py:CLASS."""
    file, _, name = (task or "task.py:Task").rpartition(":")
    is_right = file.endswith(".py") and name.isidentifier()
    require(is_right, "must be FILE.py:CLASS, a local file and a class in it", "--task", task)


WORDS = re.compile(r"([1-9]\d*)([KMB]?)")


def words_of(text: str) -> int:
    match = WORDS.fullmatch(text)
    assert match is not None
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2]]


@dataclass(frozen=True)
class ModelConfig(Bounded):
    """Which model is trained."""

    FLAG_GROUP = MODEL

    preset: str = changeable(
        "roberta-base",
        f"Model and training settings to start from, smallest first: {', '.join(presets_by_size())}. `--preset list` "
        "shows them as a table. Flags you pass override it.",
        PUBLIC,
        is_usual=True,
    )
    pretrained_model_config: str | None = changeable(
        None,
        "Hub id or folder whose config.json defines the model, instead of the preset's model.",
        PER_WORKER,
        metavar="DIR",
    )
    init_from: str | None = flag(
        None,
        "Start from the weights of this folder (local or gs://) or Hub id. It needs config.json, the tokenizer of "
        "the shards, and model.safetensors or tf_model.h5. The preset then sets only the training settings.",
        metavar="DIR",
    )
    grow: bool = flag(
        False,
        "With --init-from: train the larger model of --preset or --pretrained-model-config, and tile the weights of "
        "--init-from over it. Both must be ModernBERTs, BERTs, RoBERTas or similar models, with heads of one width.",
        ADDED,
    )
    objective: Literal["mlm", "mlm+nsp", "mlm+sop"] = flag(
        "mlm",
        "What the model learns. mlm: predict masked tokens. mlm+nsp: also whether the second segment follows the "
        "first, as BERT. mlm+sop: also whether the two segments were swapped, as ALBERT. The last two need shards "
        "made with --chunking segment_pairs and a bert, albert or mobilebert; use them to reproduce BERT or to "
        "train the pooler, since RoBERTa found no gain in nsp.",
        ADDED,
    )
    config_overrides: str | None = changeable(
        None,
        "Changes to the model's configuration, such as num_hidden_layers=4,hidden_act=gelu_new.",
        metavar="NAME=VALUE,…",
    )
    position_init: Literal["random", "sinusoidal"] = flag(
        "random",
        "How learned position embeddings start: random, as in BERT, or sinusoidal, which helps a small model "
        "learn from neighbouring tokens sooner.",
    )
    dropout: float | None = changeable(
        None, "Dropout of hidden states and attention. Default: the model configuration's.", at_least=0, below=1
    )
    gradient_checkpointing: bool = changeable(
        False,
        "Recompute each layer in the backward pass: far less memory for activations, a third more computation.",
        ROUNDING,
    )
    block_attention: bool = flag(
        False,
        "Let tokens attend only within their document, and count positions from its start. For ModernBERT, BERT, "
        "RoBERTa and similar models.",
        ADDED,
    )
    pad_vocab_to_multiple_of: int = flag(
        128,
        "Pad the vocabulary to a multiple of N during training; 128 is the width of a TPU's vector lanes. The "
        "export has the tokenizer's size. 1 turns it off.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.init_from is not None or not self.grow, "needs --init-from, a smaller model", "--grow", "none")


@dataclass(frozen=True)
class MaskingConfig(Bounded):
    """How tokens are masked in training; evaluation always masks 15 %, so that runs compare."""

    FLAG_GROUP = "Masking"

    masking: Literal["token", "whole_word", "span"] = flag(
        "token",
        "What is masked as a whole: tokens (BERT), words, or spans of words (SpanBERT). The fraction of masked "
        "tokens is the same.",
    )
    mlm_probability: float = flag(
        0.15, "Fraction of the tokens to predict. BERT used 0.15; up to 0.4 can help.", above=0, at_most=1
    )
    mask_token_rate: float = flag(
        0.8, "Fraction of the predicted tokens that become [MASK], as in BERT.", at_least=0, at_most=1
    )
    random_token_rate: float = flag(
        0.1, "Fraction of the predicted tokens that become a random token, as in BERT.", at_least=0, at_most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        replaced = self.mask_token_rate + self.random_token_rate
        require(
            replaced <= 1 + 1e-9, "must sum to at most 1", "--mask-token-rate and --random-token-rate", f"{replaced:g}"
        )


@dataclass(frozen=True)
class OptimizationConfig(Bounded):
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    FLAG_GROUP = "Optimizer"
    layer_lr_decay = 1.0  # a flag of fine-tuning

    per_replica_batch_size: int = changeable(
        DEFAULT_BATCH_ROWS,
        "Rows per replica at once. Lower it if memory runs out.",
        ROUNDING,
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    gradient_accumulation_steps: int = changeable(
        1, "Batches whose gradients are summed into one step.", ROUNDING, group=BATCH, at_least=1
    )
    global_batch_size: int | None = changeable(
        None,
        "Rows per step over all replicas; --gradient-accumulation-steps is computed from it.",
        ROUNDING,
        group=BATCH,
        replaces="gradient_accumulation_steps",
        at_least=1,
    )
    num_epochs: int = changeable(1, "Passes over the training rows.", group=BATCH, is_usual=True, at_least=1)
    max_steps: int | None = changeable(
        None, "Train for N steps, instead of --num-epochs.", group=BATCH, is_usual=True, at_least=1
    )
    learning_rate: float = flag(1e-4, "Peak learning rate, reached after the warmup.", is_usual=True, above=0)
    schedule: Literal["linear", "cosine", "inverse_sqrt", "wsd", "constant"] = flag(
        "linear",
        "Learning rate after the warmup: linear decay (as in BERT), cosine, inverse_sqrt, constant, or wsd "
        "(constant, then decay over the last --decay-ratio of the run).",
    )
    warmup_ratio: float = flag(
        0.05,
        "Fraction of the steps over which the learning rate rises from 0. RoBERTa used 0.05, BERT 0.01.",
        at_least=0,
        below=1,
    )
    warmup_steps: int | None = flag(None, "Steps of the warmup, instead of --warmup-ratio.", at_least=0)
    decay_ratio: float = flag(0.2, "Fraction of the steps over which --schedule wsd decays.", above=0, at_most=1)
    min_learning_rate_ratio: float = flag(
        0.0,
        "Fraction of the peak at which linear, cosine and wsd end. 0 gives the lowest final loss.",
        at_least=0,
        below=1,
    )
    optimizer: Literal["adamw", "stable_adamw", "lamb", "muon"] = flag(
        "adamw",
        "adamw; stable_adamw, which slows down for weights with unusually large gradients (use it with "
        "--max-grad-norm 0); lamb for global batches of thousands of rows, with about ten times adamw's learning "
        "rate; or muon, which updates hidden matrices by orthogonalized momentum, and all else as adamw.",
    )
    muon_learning_rate: float | None = flag(
        None,
        "Peak learning rate of the matrices with --optimizer muon. Default: --learning-rate.",
        ADDED,
        belongs_to=("optimizer", "muon"),
        above=0,
    )
    muon_momentum: float = flag(
        0.95,
        "Decay of the moment of the matrices with --optimizer muon.",
        ADDED,
        belongs_to=("optimizer", "muon"),
        at_least=0,
        below=1,
    )
    weight_decay_rate: float = flag(0.01, "Decoupled weight decay, not applied to biases and layer norms.", at_least=0)
    adam_beta1: float = flag(0.9, "Decay of the first moment.", at_least=0, below=1)
    adam_beta2: float = flag(
        0.98, "Decay of the second moment. RoBERTa's 0.98 is steadier than 0.999 at large batches.", at_least=0, below=1
    )
    adam_epsilon: float = flag(1e-6, "Added to the root of the second moment, by which the update is divided.", above=0)
    max_grad_norm: float = flag(1.0, "Clip gradients to this global norm. 0 turns it off.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_said_once = self.global_batch_size is None or self.gradient_accumulation_steps == 1
        rule = "follows from --global-batch-size: pass 1, or leave out --global-batch-size"
        require(is_said_once, rule, "--gradient-accumulation-steps", self.gradient_accumulation_steps)
        require(
            self.min_learning_rate_ratio == 0 or self.schedule in ("linear", "cosine", "wsd"),
            "needs --schedule linear, cosine or wsd",
            "--min-learning-rate-ratio",
            f"{self.min_learning_rate_ratio} with {self.schedule}",
        )
        for name in ("muon_learning_rate", "muon_momentum"):
            is_default = getattr(self, name) == getattr(OptimizationConfig, name)
            given = f"{getattr(self, name)} with {self.optimizer}"
            require(
                is_default or self.optimizer == "muon", "needs --optimizer muon", f"--{name.replace('_', '-')}", given
            )
