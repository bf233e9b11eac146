"""Settings of stage 3, one frozen dataclass per subject; every field is a flag of `run_mlm.py`."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_type_hints

from mlm_common.cli.settings import PUBLIC, flag, flag_of, require, require_each
from mlm_common.errors import InputError
from mlm_common.hub.push import MAIN_BRANCH, HubRepository
from train.config.presets import presets_by_size

# Marks of a setting. A resumed run may be given another value; each worker of a run may; another value changes how sums
# are rounded, and nothing else; runs of before it was added have its default.
MAY_CHANGE, PER_WORKER, ROUNDING, ADDED = "may_change", "per_worker", "rounding", "added"
# Steps of one call from Python on a TPU; a call costs its host a millisecond or more in which it may wait.
TPU_STEPS_PER_EXECUTION = 32
MASK = "[MASK]"
# The fraction of the tokens that evaluation masks, whatever training does, so that any two runs compare.
EVALUATION_MLM_PROBABILITY = 0.15
# Groups of `--help` beside those of the dataclasses.
BATCH, EVALUATION, CHECKPOINTS, FAULTS = (
    "Batch and length",
    "Evaluation and logging",
    "Checkpoints and resuming",
    "Fault tolerance",
)


def changeable(default: Any, help_text: str, *marks: str, **shown: Any) -> Any:
    """Make a flag whose value may change when a run resumes; `shown` goes to `mlm_common.cli.settings.flag`."""
    return flag(default, help_text, MAY_CHANGE, *marks, **shown)


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from; length, vocabulary and special ids are read from the shards' manifest."""

    FLAG_GROUP = "Data"

    train_dataset: str | None = changeable(
        None,
        "Folder of training shards, local or gs://: OUTPUT_DIR/train of prepare_tfrecord_shards.py.",
        PER_WORKER,
        metavar="DIR",
        is_usual=True,
    )
    eval_dataset: str | None = changeable(
        None, "Folder of validation shards. Without it nothing is evaluated.", PER_WORKER, metavar="DIR", is_usual=True
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
    shuffle_buffer_size: int = flag(
        2**15, "Rows held in memory and shuffled together. Whole shards are shuffled first, so it need not be large."
    )

    def __post_init__(self) -> None:
        require_each(self, "shuffle_buffer_size", lambda value: value >= 1, "must be at least 1 row")


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    FLAG_GROUP = "Model"

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
        None, "Dropout of hidden states and attention. Default: the model configuration's."
    )
    gradient_checkpointing: bool = changeable(
        False,
        "Recompute each layer in the backward pass: far less memory for activations, a third more computation.",
        ROUNDING,
        former_name="recompute",
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
    )

    def __post_init__(self) -> None:
        require_each(self, "dropout", lambda value: 0 <= value < 1, "must be at least 0 and below 1")
        require_each(self, "pad_vocab_to_multiple_of", lambda value: value >= 1, "must be at least 1")


@dataclass(frozen=True)
class MaskingConfig:
    """How tokens are masked in training; evaluation always masks 15 %, so that runs compare."""

    FLAG_GROUP = "Masking"

    masking: Literal["token", "whole_word", "span"] = flag(
        "token",
        "What is masked as a whole: tokens (BERT), words, or spans of words (SpanBERT). The fraction of masked "
        "tokens is the same.",
    )
    mlm_probability: float = flag(0.15, "Fraction of the tokens to predict. BERT used 0.15; up to 0.4 can help.")
    mask_token_rate: float = flag(0.8, "Fraction of the predicted tokens that become [MASK], as in BERT.")
    random_token_rate: float = flag(0.1, "Fraction of the predicted tokens that become a random token, as in BERT.")

    def __post_init__(self) -> None:
        rates = "mlm_probability mask_token_rate random_token_rate"
        require_each(self, rates, lambda value: 0 <= value <= 1, "must be between 0 and 1")
        require_each(self, "mlm_probability", lambda value: value > 0, "must be above 0")
        replaced = self.mask_token_rate + self.random_token_rate
        require(
            replaced <= 1 + 1e-9, "must sum to at most 1", "--mask-token-rate and --random-token-rate", f"{replaced:g}"
        )


@dataclass(frozen=True)
class OptimizationConfig:
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    FLAG_GROUP = "Optimizer"

    per_replica_batch_size: int = changeable(
        8, "Rows per replica at once. Lower it if memory runs out.", ROUNDING, group=BATCH, is_usual=True
    )
    gradient_accumulation_steps: int = changeable(
        1, "Batches whose gradients are summed into one step.", ROUNDING, group=BATCH
    )
    global_batch_size: int | None = changeable(
        None,
        "Rows per step over all replicas; sets --gradient-accumulation-steps, which a preset may set too: then "
        "also pass --gradient-accumulation-steps 1.",
        ROUNDING,
        group=BATCH,
    )
    num_epochs: int = changeable(1, "Passes over the training rows.", group=BATCH, is_usual=True)
    max_steps: int | None = changeable(None, "Train for N steps, instead of --num-epochs.", group=BATCH, is_usual=True)
    learning_rate: float = flag(1e-4, "Peak learning rate, reached after the warmup.", is_usual=True)
    schedule: Literal["linear", "cosine", "inverse_sqrt", "wsd", "constant"] = flag(
        "linear",
        "Learning rate after the warmup: linear decay (as in BERT), cosine, inverse_sqrt, constant, or wsd "
        "(constant, then decay over the last --decay-ratio of the run).",
    )
    warmup_ratio: float = flag(
        0.05, "Fraction of the steps over which the learning rate rises from 0. RoBERTa used 0.05, BERT 0.01."
    )
    warmup_steps: int | None = flag(None, "Steps of the warmup, instead of --warmup-ratio.")
    decay_ratio: float = flag(0.2, "Fraction of the steps over which --schedule wsd decays.")
    min_learning_rate_ratio: float = flag(
        0.0, "Fraction of the peak at which linear, cosine and wsd end. 0 gives the lowest final loss."
    )
    optimizer: Literal["adamw", "lamb"] = flag(
        "adamw", "adamw, or lamb for global batches of thousands of rows, with about ten times adamw's learning rate."
    )
    weight_decay_rate: float = flag(0.01, "Decoupled weight decay, not applied to biases and layer norms.")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(
        0.98, "Decay of the second moment. RoBERTa's 0.98 is steadier than 0.999 at large batches."
    )
    adam_epsilon: float = flag(1e-6, "Added to the root of the second moment, by which the update is divided.")
    max_grad_norm: float = flag(1.0, "Clip gradients to this global norm. 0 turns it off.")

    def __post_init__(self) -> None:
        counts = "per_replica_batch_size gradient_accumulation_steps global_batch_size num_epochs max_steps"
        require_each(self, counts, lambda value: value >= 1, "must be at least 1")
        is_said_once = self.global_batch_size is None or self.gradient_accumulation_steps == 1
        rule = "follows from --global-batch-size: pass 1, or leave out --global-batch-size"
        require(is_said_once, rule, "--gradient-accumulation-steps", self.gradient_accumulation_steps)
        require_each(self, "learning_rate adam_epsilon", lambda value: value > 0, "must be above 0")
        not_negative = "warmup_steps weight_decay_rate max_grad_norm"
        require_each(self, not_negative, lambda value: value >= 0, "must not be negative")
        shares = "warmup_ratio min_learning_rate_ratio adam_beta1 adam_beta2"
        require_each(self, shares, lambda value: 0 <= value < 1, "must be at least 0 and below 1")
        require_each(self, "decay_ratio", lambda value: 0 < value <= 1, "must be above 0 and at most 1")
        require(
            self.min_learning_rate_ratio == 0 or self.schedule in ("linear", "cosine", "wsd"),
            "needs --schedule linear, cosine or wsd",
            "--min-learning-rate-ratio",
            f"{self.min_learning_rate_ratio} with {self.schedule}",
        )


@dataclass(frozen=True)
class HardwareConfig:
    """What the run computes on: the TPU that is named, else the GPUs there are, else the CPU."""

    FLAG_GROUP = "Hardware"

    tpu_name: str | None = changeable(
        None, "TPU to train on: local on a TPU VM, otherwise its name or grpc:// address.", is_usual=True
    )
    tpu_zone: str | None = changeable(None, "Zone of a TPU given by name.")
    gcp_project: str | None = changeable(None, "Google Cloud project of a TPU given by name.")
    no_tpu: bool = changeable(False, "Do not use a TPU, even if --tpu-name is given.")
    bfloat16: bool = flag(False, "Compute in bfloat16 with XLA. Weights, optimizer and loss stay in float32.")
    jit_compile: bool | None = changeable(
        None,
        "Compile the step with XLA. Default: true on TPU and GPU, with --bfloat16, and on one CPU if the run is "
        "long enough to pay for compiling. A resumed run on the same hardware computes as before.",
        ROUNDING,
    )
    tpu_layers: Literal["auto", "on", "off"] = changeable(
        "auto",
        "TPU-optimized attention with the same weights and results: about a third fewer cycles for roberta-base. "
        "For ModernBERT, BERT, RoBERTa and similar models. auto: on a TPU, if loss and gradients of the first "
        "rows match those of the reference layers. on: without that check. off: the reference layers.",
        ROUNDING,
    )
    steps_per_execution: int | None = changeable(
        None,
        "Steps per call from Python, at most; a call also ends where something is logged, evaluated or saved, and "
        "after about a second. Default: 32 on a TPU, where each call costs a millisecond or more; 1 elsewhere.",
    )

    def __post_init__(self) -> None:
        require_each(self, "steps_per_execution", lambda value: value >= 1, "must be at least 1")
        # Without XLA, TensorFlow adds up the gradients of biases in bfloat16, most of which is lost.
        for needs_xla, reason in ((self.bfloat16, "--bfloat16"), (self.tpu_layers == "on", "--tpu-layers on")):
            is_compiled = self.wants_tpu or self.jit_compile is not False or not needs_xla
            require(is_compiled, f"must not be false with {reason}", "--jit-compile", self.jit_compile)

    @property
    def wants_tpu(self) -> bool:
        """Whether a TPU is asked for."""
        return self.tpu_name is not None and not self.no_tpu

    @property
    def max_steps_per_execution(self) -> int:
        """Steps that one call from Python may make."""
        return self.steps_per_execution or (TPU_STEPS_PER_EXECUTION if self.wants_tpu else 1)


@dataclass(frozen=True)
class RunConfig:
    """Where the run writes, how often, and its seed."""

    FLAG_GROUP = "Output"

    output_dir: str | None = changeable(
        None,
        "Folder for everything the run writes, local or gs://: metrics.jsonl, checkpoints/, export/ …",
        PER_WORKER,
        metavar="DIR",
        is_usual=True,
    )
    phases: str | None = changeable(
        None,
        "YAML file for a run in phases: settings of the whole run, and of each phase its shards, steps and what "
        "else changes (examples in recipes/).",
        PER_WORKER,
        metavar="FILE",
        group=BATCH,
    )
    seed: int = flag(0, "Seed of initial weights, order of rows and masks.")
    log_steps: int | None = changeable(
        None,
        "Write a line of metrics.jsonl every N steps. Default: a fiftieth of the run, at most 50.",
        group=EVALUATION,
    )
    eval_steps: int | None = changeable(
        None,
        "Evaluate every N steps. Default: at most ten times per run, in at most a tenth of its time.",
        group=EVALUATION,
    )
    save_steps: int | None = changeable(
        None,
        "Save a checkpoint every N steps. Default: at each evaluation if --eval-steps is given, else ten per run.",
        group=CHECKPOINTS,
    )
    save_minutes: float | None = changeable(
        None,
        "Also save a checkpoint every X minutes; 0 turns it off. Default: 15 on a TPU, otherwise off.",
        group=CHECKPOINTS,
    )
    keep_checkpoints: int = changeable(
        2, "How many of the newest checkpoints to keep. The best one is always kept as well.", group=CHECKPOINTS
    )
    resume: Literal["auto", "must", "never"] = changeable(
        "auto",
        "auto: continue the run in --output-dir if it is this one. must: fail if there is nothing to resume. "
        "never: fail if there is a run.",
        group=CHECKPOINTS,
    )
    overwrite_output_dir: bool = changeable(
        False, "Delete the run in --output-dir and start over. Files that no run writes are kept.", group=CHECKPOINTS
    )
    on_nonfinite: Literal["stop", "skip"] = changeable(
        "stop",
        "If a loss or gradient is not finite, or the loss rises by --max-loss-rise. stop: end the run. skip: "
        "return to the last good checkpoint and leave out the rows since then.",
        group=FAULTS,
    )
    max_loss_rise: float | None = changeable(
        None,
        "Nats by which a logged loss may exceed the median of the five before it. Default: no limit.",
        group=FAULTS,
    )
    max_rollbacks: int = changeable(3, "With --on-nonfinite skip: stop after N returns to a checkpoint.", group=FAULTS)
    supervise: bool = changeable(
        False,
        "Train in a child process and restart it after a crash, a lost TPU or maintenance. It resumes from the "
        "newest checkpoint.",
        group=FAULTS,
    )
    stall_minutes: float = changeable(
        30.0, "With --supervise: restart training if nothing happens for X minutes.", group=FAULTS
    )
    max_retries: int = changeable(
        5, "With --supervise: give up after N restarts in a row without a step of progress.", group=FAULTS
    )
    retry_seconds: float = changeable(
        10.0,
        "With --supervise: wait X seconds before the first restart in a row; the wait doubles each time.",
        group=FAULTS,
    )
    profile: str | None = changeable(
        None,
        "Trace steps START to STOP for TensorBoard's profiler, such as 100:105.",
        metavar="START:STOP",
        group=EVALUATION,
    )
    dry_run: bool = changeable(False, "Check everything, print the plan, and stop.", is_usual=True)

    def __post_init__(self) -> None:
        counts = "log_steps eval_steps save_steps keep_checkpoints"
        require_each(self, counts, lambda value: value >= 1, "must be at least 1")
        above_0 = "stall_minutes retry_seconds max_loss_rise"
        require_each(self, above_0, lambda value: value > 0, "must be above 0")
        require_each(self, "save_minutes max_retries max_rollbacks", lambda value: value >= 0, "must not be negative")
        require_each(self, "seed", lambda value: 0 <= value < 2**31, "must be between 0 and 2147483647")
        if self.overwrite_output_dir and self.resume == "must":
            raise InputError("--overwrite-output-dir cannot be combined with --resume must.")
        start, _, stop = (self.profile or "0:1").partition(":")
        holds = start.isdecimal() and stop.isdecimal() and int(start) < int(stop)
        require(holds, "must be START:STOP, two steps with START below STOP", "--profile", self.profile)

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The steps after which a trace begins and ends; None without one."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        return int(start), int(stop)


@dataclass(frozen=True)
class HubConfig:
    """Where the export is pushed to, how often, and what its card says that the run does not know."""

    FLAG_GROUP = "Hub"

    hub_model_id: str | None = changeable(
        None, "Push the export to this repository on the Hub.", PUBLIC, metavar="USER/NAME"
    )
    hub_private: bool = changeable(False, "Make the repository private when it is created.")
    hub_revision: str | None = changeable(
        None, "Branch to push to; created if it does not exist. Default: main.", PUBLIC
    )
    hub_tag: str | None = changeable(None, "Tag for the commit of the last push.", PUBLIC)
    hub_strategy: Literal["end", "epoch", "steps", "checkpoint"] = changeable(
        "end",
        "When to push. end: after the last step. epoch: also after each epoch. steps: also every --push-steps "
        "steps. checkpoint: as steps, with the newest training checkpoint to the branch `checkpoints`. Training "
        "continues during a push; if pushes fall behind, only the newest is made.",
    )
    push_steps: int | None = changeable(
        None, "Push every N steps with --hub-strategy steps or checkpoint. Default: at each checkpoint."
    )
    resume_from_hub: bool = changeable(
        False, "If --output-dir has no run, resume from the checkpoint that --hub-strategy checkpoint pushed."
    )
    publish_details: bool = changeable(
        False,
        "Do not redact the records that --hub-strategy checkpoint pushes: paths of shards, run and corpus, names "
        "of buckets, and the TPU's project, name and zone. Default: these are redacted.",
    )
    hub_license: str | None = changeable(
        None, "License for the model card, as the Hub spells it: apache-2.0, mit, cc-by-4.0 …", PUBLIC
    )
    hub_language: list[str] = changeable(
        list, "Languages for the model card: ISO 639 codes such as en de, or multilingual.", PUBLIC, metavar="CODE"
    )
    hub_example: str | None = changeable(
        None,
        f"Example sentence for the model card, with {MASK} in it. Default: a sentence of the validation text, unless "
        "the card is pushed and the corpus is not a public data set of the Hub.",
        PUBLIC,
        metavar="TEXT",
    )

    def __post_init__(self) -> None:
        require_each(self, "push_steps", lambda value: value >= 1, "must be at least 1")
        is_by_steps = self.push_steps is None or self.hub_strategy in ("steps", "checkpoint")
        require(is_by_steps, "needs --hub-strategy steps or checkpoint", "--push-steps", self.hub_strategy)
        if self.hub_model_id is None:
            without = "hub_revision hub_tag hub_strategy resume_from_hub"
            require_each(self, without, lambda value: value in ("end", False), "needs --hub-model-id")
        has_one_mask = self.hub_example is None or self.hub_example.count(MASK) == 1
        require(has_one_mask, f"must have one {MASK}", "--hub-example", repr(self.hub_example))

    def repository(self) -> HubRepository | None:
        """Build what is pushed to, None when nothing is."""
        if self.hub_model_id is None:
            return None
        branch, private = self.hub_revision or MAIN_BRANCH, self.hub_private
        return HubRepository(self.hub_model_id, private=private, branch=branch, tag=self.hub_tag)


class RunSettings:
    """All settings of one run, a dataclass for each subject; those that every kind of run has are named here."""

    model: ModelConfig
    optimization: OptimizationConfig
    hardware: HardwareConfig
    run: RunConfig
    hub: HubConfig

    def folders(self) -> dict[str, str | None]:
        """Map flags to the folders that the hosts of a TPU read and write."""
        return {"--output-dir": self.run.output_dir}

    @classmethod
    def subjects(cls) -> dict[str, type]:
        """Map each subject to the dataclass of its settings, in their order."""
        types = get_type_hints(cls)
        return {subject.name: types[subject.name] for subject in fields(cast(Any, cls))}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Copy the settings as plain values, subject by subject, in the order of the fields."""
        return asdict(cast(Any, self))

    def without(self, mark: str) -> dict[str, Any]:
        """Copy the settings that do not bear a mark, as {subject.name: value}."""
        named = {
            f"{subject}.{name}": value for subject, values in self.as_dict().items() for name, value in values.items()
        }
        marked = settings_marked(mark, type(self))
        return {name: value for name, value in named.items() if name not in marked}


@dataclass(frozen=True)
class TrainingConfig(RunSettings):
    """All settings of one run of pretraining."""

    data: DataConfig
    model: ModelConfig
    masking: MaskingConfig
    optimization: OptimizationConfig
    hardware: HardwareConfig
    run: RunConfig
    hub: HubConfig = field(default_factory=HubConfig)

    def folders(self) -> dict[str, str | None]:
        """Map flags to the folders that the hosts of a TPU read and write."""
        shards = {"--train-dataset": self.data.train_dataset, "--eval-dataset": self.data.eval_dataset}
        return shards | super().folders()


SUBJECTS = tuple(TrainingConfig.subjects().values())


def default_of(name: str, config_class: type[RunSettings] = TrainingConfig) -> Any:
    """Look up the default of a setting, by `subject.name`."""
    subject, _, own_name = name.partition(".")
    return next(one.default for one in fields(config_class.subjects()[subject]) if one.name == own_name)


def settings_marked(mark: str, config_class: type[RunSettings] = TrainingConfig) -> frozenset[str]:
    """List the settings that bear a mark, as `subject.name`."""
    subjects = config_class.subjects().items()
    settings = {f"{subject}.{one.name}": one for subject, config in subjects for one in fields(config)}
    return frozenset(name for name, one in settings.items() if mark in one.metadata["marks"])


def flags_marked(mark: str, config_class: type[RunSettings] = TrainingConfig) -> list[str]:
    """List the settings that bear a mark, as they are spelled on the command line, sorted."""
    return sorted(flag_of(name.partition(".")[2]) for name in settings_marked(mark, config_class))
