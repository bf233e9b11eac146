"""Settings of data, model, masking and optimizer. Each field is a flag of `run_mlm.py`."""

import re
from dataclasses import dataclass
from typing import Literal

from mlm_common.cli.settings import Bounded, Public, flag, flag_of, require
from mlm_common.mixture import named_folders
from train.config import Added, Changeable, PerWorker, Rounding
from train.config.presets import DEFAULT_BATCH_ROWS, presets_by_size

# Evaluation masks this fraction of the tokens, whatever fraction training masks, so that the losses of runs are
# comparable.
EVALUATION_MLM_PROBABILITY = 0.15
# Groups of `--help` that contain settings of several dataclasses.
MODEL, MIXTURE, BATCH, EVALUATION, CHECKPOINTS, FAULTS = (
    "Model",
    "Mixture of sources",
    "Batch and length",
    "Evaluation and logging",
    "Checkpoints and resuming",
    "Fault tolerance",
)

# Alternatives: each of these settings determines how often each source of a mixture is read.
SOURCE_SETTINGS = ("source_weights", "sampling_alpha", "source_passes")


@dataclass(frozen=True)
class DataConfig(Bounded):
    """Where the rows come from. Row length, vocabulary and special ids are read from the shards' manifest."""

    FLAG_GROUP = "Data"

    train_dataset: PerWorker[str | None] = flag(
        None,
        "Training shards: the folder OUTPUT_DIR/train that prepare_tfrecord_shards.py wrote, local or gs://. From the "
        "Hub: hub:USER/NAME[/FOLDER][@REVISION]. For a mixture: OUTPUT_DIR of prepare_tfrecord_shards.py --sources, "
        "or several folders, NAME=DIR NAME=DIR …",
        metavar="DIR",
        is_usual=True,
        takes_several=True,
    )
    eval_dataset: PerWorker[str | None] = flag(
        None,
        "Validation shards, in the same form as --train-dataset. Without them there is no validation loss.",
        metavar="DIR",
        is_usual=True,
        takes_several=True,
    )
    source_weights: Changeable[list[str]] = flag(
        list,
        "Fraction of the rows to take from each source, NAME=X NAME=X …; the sum must be 1. Default: the weights of "
        "the mixture; if it has none, in proportion to the rows of the sources.",
        metavar="NAME=X",
        group=MIXTURE,
    )
    sampling_alpha: Changeable[float | None] = flag(
        None,
        "Instead of --source-weights: take rows from each source in proportion to tokens^X. With X below 1, small "
        "sources are read more often than large ones; XLM-R used 0.3.",
        group=MIXTURE,
        at_least=0,
        at_most=1,
    )
    source_passes: Changeable[list[str]] = flag(
        list,
        "Instead of --source-weights: how many times each source is read per epoch, NAME=X NAME=X …",
        metavar="NAME=X",
        group=MIXTURE,
    )
    max_passes: Changeable[float] = flag(
        10.0, "Warn if a run reads a source more than X times.", group=MIXTURE, above=0
    )
    metric_for_best: Changeable[Public[str]] = flag(
        "loss",
        "Validation loss that selects the best checkpoint: `loss`, the weighted mean over the sources, or "
        "`eval_loss_NAME`, the loss of one source.",
        metavar="NAME",
        group=EVALUATION,
    )
    tokenizer: PerWorker[str | None] = flag(
        None,
        "Folder or Hub id of the tokenizer. Default: the one saved with the training shards.",
        metavar="DIR",
    )
    max_length: Changeable[int | None] = flag(
        None, "Tokens per row. Default: as in the shards; any other value is an error.", group=BATCH
    )
    score_pairs: Changeable[str | None] = flag(
        None,
        "Also score minimal pairs at each evaluation, logged as `pairs_accuracy`. The file has BLiMP's format (JSON "
        "lines, also .gz); at most 400 pairs are used.",
        metavar="FILE",
        group=EVALUATION,
    )
    score_words: Changeable[int] = flag(
        0,
        "Also score N words of the validation shards at each evaluation: masked one token at a time (`bits_per_byte`), "
        "and masked as whole words (`word_accuracy`).",
        group=EVALUATION,
        at_least=0,
    )
    save_at_words: Changeable[list[str]] = flag(
        list,
        "Save and keep checkpoints after these numbers of words, such as 1M 2M 10M, and export them to "
        "OUTPUT_DIR/words/chck_1M … With --hub-model-id, also push them to branches with these names.",
        group=CHECKPOINTS,
        metavar="WORDS",
    )
    task: PerWorker[str | None] = flag(
        None,
        "Train your own task instead of --objective: a subclass of train.tasks.task.PretrainingTask in a local file, "
        "such as recipes/replaced_tokens.py:ReplacedTokens. The file is executed.",
        metavar="FILE.py:CLASS",
        group=MODEL,
    )
    shuffle_buffer_size: int = flag(
        2**15,
        "Number of rows held in memory to be shuffled. It need not be large, because whole shards are shuffled first.",
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
        """Return the folders of shards, {flag and name of the source: folder}."""
        folders = {}
        for flag_name, text in (("--train-dataset", self.train_dataset), ("--eval-dataset", self.eval_dataset)):
            for name, folder in named_folders(text, flag_name).items() if text else ():
                folders[f"{flag_name} {name}".rstrip()] = folder
        return folders


def check_task_flag(task: str | None) -> None:
    """Check that the value of `--task` has the form FILE.py:CLASS, if the flag is given.

    Raises:
        InputError: the value does not have this form.
    """
    file, _, name = (task or "task.py:Task").rpartition(":")
    is_right = file.endswith(".py") and name.isidentifier()
    require(is_right, "must be FILE.py:CLASS, a local file and a class in it", "--task", task)


WORDS = re.compile(r"([1-9]\d*)([KMB]?)")


def words_of(text: str) -> int:
    """Parse a word count given to `--save-at-words`, such as 10M."""
    match = WORDS.fullmatch(text)
    assert match is not None
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2]]


@dataclass(frozen=True)
class ModelConfig(Bounded):
    """The initial weights of a model, changes to its configuration, dropout and gradient checkpointing."""

    FLAG_GROUP = MODEL

    init_from: str | None = None  # each stage says which models it accepts
    config_overrides: Changeable[str | None] = flag(
        None,
        "Changes to the model's configuration, such as num_hidden_layers=4,hidden_act=gelu_new.",
        metavar="NAME=VALUE,…",
    )
    dropout: Changeable[float | None] = flag(
        None, "Dropout of hidden states and attention. Default: as in the model's config.", at_least=0, below=1
    )
    gradient_checkpointing: Rounding[bool] = flag(
        False,
        "Recompute each layer in the backward pass. Activations take far less memory; computation grows by a third.",
    )

    @property
    def network_options(self) -> dict[str, bool]:
        """The options of `train.model.build.build_network` that follow from the settings."""
        return {"gradient_checkpointing": self.gradient_checkpointing}


@dataclass(frozen=True)
class PretrainedModel(ModelConfig):
    """The model to pretrain."""

    preset: Changeable[Public[str]] = flag(
        "roberta-base",
        f"Model and training settings to start from, smallest first: {', '.join(presets_by_size())}. `--preset list` "
        "shows them as a table. Flags you pass override it.",
        is_usual=True,
    )
    pretrained_model_config: PerWorker[str | None] = flag(
        None,
        "Hub id or folder whose config.json defines the model, instead of the preset's model.",
        metavar="DIR",
    )
    init_from: str | None = flag(
        None,
        "Start from the weights of this folder (local or gs://) or Hub id. It needs config.json, the tokenizer of "
        "the shards, and model.safetensors or tf_model.h5. The preset then sets only the training settings.",
        metavar="DIR",
    )
    grow: Added[bool] = flag(
        False,
        "Train the larger model of --preset or --pretrained-model-config, and initialize it by repeating the weights "
        "of the smaller model of --init-from. Both must be ModernBERTs, BERTs, RoBERTas or similar models, with "
        "attention heads of the same width.",
    )
    objective: Added[Literal["mlm", "mlm+nsp", "mlm+sop"]] = flag(
        "mlm",
        "What the model learns. mlm: predict masked tokens. mlm+nsp: also predict whether the second segment follows "
        "the first (BERT). mlm+sop: also predict whether the two segments were swapped (ALBERT). The last two need "
        "shards made with --chunking segment_pairs, and a bert, albert or mobilebert. Use them to reproduce BERT or to "
        "train the pooler; RoBERTa found no gain from nsp.",
    )
    position_init: Literal["random", "sinusoidal"] = flag(
        "random",
        "How learned position embeddings start: random, as in BERT, or sinusoidal, which helps a small model "
        "learn from neighbouring tokens sooner.",
    )
    block_attention: Added[bool] = flag(
        False,
        "Let tokens attend only to tokens of the same document, and count positions from the start of the document. "
        "For ModernBERT, BERT, RoBERTa and similar models.",
    )
    pad_vocab_to_multiple_of: int = flag(
        128,
        "Pad the vocabulary to a multiple of N during training; 128 is the width of a TPU's vector lanes. The "
        "exported model has the tokenizer's size. 1 turns padding off.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.init_from is not None or not self.grow, "needs --init-from, a smaller model", "--grow", "none")

    @property
    def network_options(self) -> dict[str, bool]:
        return super().network_options | {
            "sinusoidal_positions": self.position_init == "sinusoidal",
            "block_attention": self.block_attention,
        }


@dataclass(frozen=True)
class MaskingConfig(Bounded):
    """How tokens are masked in training. Evaluation always masks 15%, so that the losses of runs are comparable."""

    FLAG_GROUP = "Masking"

    masking: Literal["token", "whole_word", "span"] = flag(
        "token",
        "Unit of masking: tokens (BERT), whole words, or spans of words (SpanBERT). The fraction of masked tokens is "
        "the same.",
    )
    mlm_probability: float = flag(
        0.15, "Fraction of the tokens to predict. BERT used 0.15; up to 0.4 can help.", above=0, at_most=1
    )
    mask_token_rate: float = flag(
        0.8, "Fraction of the tokens to predict that is replaced by [MASK], as in BERT.", at_least=0, at_most=1
    )
    random_token_rate: float = flag(
        0.1, "Fraction of the tokens to predict that is replaced by a random token, as in BERT.", at_least=0, at_most=1
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

    per_replica_batch_size: Rounding[int] = flag(
        DEFAULT_BATCH_ROWS,
        "Rows that each replica processes at once. Lower it if you run out of memory.",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    gradient_accumulation_steps: Rounding[int] = flag(
        1, "Number of batches whose gradients are summed for one step.", group=BATCH, at_least=1
    )
    global_batch_size: Rounding[int | None] = flag(
        None,
        "Rows per step over all replicas; --gradient-accumulation-steps is computed from it.",
        group=BATCH,
        replaces="gradient_accumulation_steps",
        at_least=1,
    )
    num_epochs: Changeable[int] = flag(1, "Passes over the training rows.", group=BATCH, is_usual=True, at_least=1)
    max_steps: Changeable[int | None] = flag(
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
        "Final learning rate of linear, cosine and wsd, as a fraction of the peak. 0 gives the lowest final loss.",
        at_least=0,
        below=1,
    )
    optimizer: Literal["adamw", "stable_adamw", "lamb", "muon"] = flag(
        "adamw",
        "adamw; stable_adamw, which takes smaller steps for weights with unusually large gradients (use it with "
        "--max-grad-norm 0); lamb, for global batches of thousands of rows, with about ten times adamw's learning "
        "rate; or muon, which updates hidden matrices with orthogonalized momentum, and everything else as adamw does.",
    )
    muon_learning_rate: Added[float | None] = flag(
        None,
        "Peak learning rate of the matrices with --optimizer muon. Default: --learning-rate.",
        belongs_to=("optimizer", "muon"),
        above=0,
    )
    muon_momentum: Added[float] = flag(
        0.95,
        "Momentum of the matrices with --optimizer muon.",
        belongs_to=("optimizer", "muon"),
        at_least=0,
        below=1,
    )
    weight_decay_rate: float = flag(0.01, "Decoupled weight decay, not applied to biases and layer norms.", at_least=0)
    adam_beta1: float = flag(0.9, "Decay of the first moment.", at_least=0, below=1)
    adam_beta2: float = flag(
        0.98, "Decay of the second moment. RoBERTa's 0.98 is steadier than 0.999 at large batches.", at_least=0, below=1
    )
    adam_epsilon: float = flag(1e-6, "Small constant in the denominator of the update, for stability.", above=0)
    max_grad_norm: float = flag(1.0, "Clip gradients to this global norm. 0 turns it off.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_consistent = self.global_batch_size is None or self.gradient_accumulation_steps == 1
        rule = "is computed from --global-batch-size: leave it at 1, or leave out --global-batch-size"
        require(is_consistent, rule, "--gradient-accumulation-steps", self.gradient_accumulation_steps)
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
