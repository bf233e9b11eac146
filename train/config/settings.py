"""Settings of stage 3, one frozen dataclass per subject; every field is a flag of `run_mlm.py`."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_type_hints

from mlm_common.hub.own_files import FormerPush
from mlm_common.hub.push import MAIN_BRANCH, HubRepository
from mlm_common.settings import PUBLIC, flag, require, require_each, spelled
from tokenizer_training.tokenizer import TOKENIZER_FILES

# Marks of a setting. A resumed run may be given another value; each worker of a run may; another value changes how sums
# are rounded, and nothing else; runs of before it was added have its default.
MAY_CHANGE, PER_WORKER, ROUNDING, ADDED = "may_change", "per_worker", "rounding", "added"
# Steps of one call from Python on a TPU; a call costs its host a millisecond or more in which it may wait.
TPU_STEPS_PER_EXECUTION = 32
MASK = "[MASK]"
FORMER_PUSH = FormerPush(
    proof="README.md",
    marks=("- It knows what its corpus holds, and repeats what is wrong or unfair there.",),
    names=r"README\.md|loss\.png|config\.json|model\.safetensors|tf_model\.h5|runs/events\.out\.tfevents\.\d+"
    r"|run\.json|metrics\.jsonl|checkpoints/step-\d+\.(json|safetensors)|" + TOKENIZER_FILES.pattern,
)


def changeable(default: Any, help_text: str, *marks: str, former_name: str | None = None) -> Any:
    """Make a flag of which a resumed run may be given another value."""
    return flag(default, help_text, MAY_CHANGE, *marks, former_name=former_name)


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from; length, vocabulary and special ids are read from the shards' manifest."""

    train_dataset: str | None = changeable(
        None, "Folder of training shards, local or gs:// (OUTPUT_DIR/train of stage 2).", PER_WORKER
    )
    eval_dataset: str | None = changeable(
        None, "Folder of validation shards; without it nothing is evaluated.", PER_WORKER
    )
    tokenizer: str | None = changeable(
        None,
        "Folder or Hub id of the tokenizer; by default the one that stage 2 saved with the training shards.",
        PER_WORKER,
    )
    max_length: int | None = changeable(None, "Tokens a row; read from the shards, so only checked against them.")
    shuffle_buffer_size: int = flag(
        2**15, "Rows held in memory and permuted together; whole shards are permuted before, so it need not be large."
    )

    def __post_init__(self) -> None:
        require_each(self, "shuffle_buffer_size", lambda value: value >= 1, "must be at least 1 row")


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    preset: str = changeable(
        "roberta-base",
        "A file of train/model/presets/ by name: model and training settings; any flag given wins over it.",
        PUBLIC,
    )
    pretrained_model_config: str | None = changeable(
        None,
        "Hub id or folder whose config.json gives the architecture, in the place of the preset's model.",
        PER_WORKER,
    )
    init_from: str | None = flag(
        None,
        "Continue from this checkpoint: a folder (local or gs://) or Hub id with config.json, the tokenizer of the "
        "shards, and weights in safetensors or TensorFlow's h5. The preset then gives the training settings only.",
    )
    objective: Literal["mlm", "mlm+nsp", "mlm+sop"] = flag(
        "mlm",
        "What is learned: masked tokens; with them, as BERT, whether the second segment of a row follows the first "
        "(nsp); or, as ALBERT, whether the two were swapped (sop). These need shards of --chunking segment_pairs, and "
        "a bert, albert or mobilebert. They are for parity, and a trained pooler: RoBERTa found no gain in nsp.",
        ADDED,
    )
    config_overrides: str | None = changeable(
        None, "Changes to the model's configuration: num_hidden_layers=4,hidden_act=gelu_new"
    )
    position_init: Literal["random", "sinusoidal"] = flag(
        "random",
        "How a table of learned positions starts: random as in BERT, or as sinusoids, with which a small model learns "
        "from neighbours sooner.",
    )
    dropout: float | None = changeable(
        None, "Dropout of hidden states and of attention, whatever the configuration says; the export records it."
    )
    gradient_checkpointing: bool = changeable(
        False,
        "Compute each layer again in the backward pass: a third more computing, far less memory for activations.",
        ROUNDING,
        former_name="recompute",
    )
    block_attention: bool = flag(
        False,
        "Keep the documents of a row apart: tokens see those of their own document alone, and positions begin anew in "
        "each, as if each had a row of its own; for ModernBERT, BERT, RoBERTa and their like.",
        ADDED,
    )
    pad_vocab_to_multiple_of: int = flag(
        128,
        "Fill the model's vocabulary up to a multiple of this, the width of a TPU's lanes; the export has the "
        "tokenizer's own. 1 turns it off.",
    )

    def __post_init__(self) -> None:
        require_each(self, "dropout", lambda value: 0 <= value < 1, "must be at least 0 and below 1")
        require_each(self, "pad_vocab_to_multiple_of", lambda value: value >= 1, "must be at least 1")


@dataclass(frozen=True)
class MaskingConfig:
    """How tokens are masked in training; evaluation always masks 15 %, so that runs compare."""

    masking: Literal["token", "whole_word", "span"] = flag(
        "token", "What is masked as a whole: tokens (BERT), words, or spans of words (SpanBERT); the share is the same."
    )
    mlm_probability: float = flag(0.15, "Share of the tokens that are predicted (BERT's 0.15; up to 0.4 can help).")
    mask_token_rate: float = flag(0.8, "Share of the predicted tokens that are replaced by the mask token (BERT's).")
    random_token_rate: float = flag(0.1, "Share of the predicted tokens that are replaced by a random one (BERT's).")

    def __post_init__(self) -> None:
        rates = "mlm_probability mask_token_rate random_token_rate"
        require_each(self, rates, lambda value: 0 <= value <= 1, "must lie in 0 to 1")
        require_each(self, "mlm_probability", lambda value: value > 0, "must be above 0, or nothing is learned")
        replaced = self.mask_token_rate + self.random_token_rate
        require(replaced <= 1 + 1e-9, "must sum to at most 1", "--mask-token-rate and --random-token-rate", replaced)


@dataclass(frozen=True)
class OptimizationConfig:
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: int = changeable(
        8, "Rows a replica takes at once; lower it when memory is short.", ROUNDING
    )
    gradient_accumulation_steps: int = changeable(1, "Batches whose gradients are summed before one step.", ROUNDING)
    global_batch_size: int | None = changeable(
        None, "Rows of a step over all replicas, from which --gradient-accumulation-steps follows.", ROUNDING
    )
    num_epochs: int = changeable(1, "Passes over the training rows.")
    max_steps: int | None = changeable(None, "Steps to make, in the place of --num-epochs.")
    learning_rate: float = flag(1e-4, "Peak, after the warmup; 1e-4 is safe for roberta-base at any batch size.")
    schedule: Literal["linear", "cosine", "inverse_sqrt", "wsd", "constant"] = flag(
        "linear",
        "The rate after the warmup: falls in a line (BERT's) or half a cosine to its end; as 1/sqrt of the step, "
        "whatever the length of the run; stays at the peak and falls in the last part (wsd); stays at the peak.",
    )
    warmup_ratio: float = flag(
        0.05, "Share of the steps over which the rate rises from 0 (RoBERTa's 0.05, BERT's 0.01)."
    )
    warmup_steps: int | None = flag(None, "Steps of the warmup, in the place of --warmup-ratio.")
    decay_ratio: float = flag(
        0.2, "Share of the steps over which wsd falls; 0.2 ends as low as a cosine (Hägele et al. 2024)."
    )
    min_learning_rate_ratio: float = flag(
        0.0, "Share of the peak at which linear, cosine and wsd end; 0 gives the lowest loss at the end of a run."
    )
    optimizer: Literal["adamw", "lamb"] = flag(
        "adamw", "adamw, or lamb for global batches of thousands of rows, with a rate of about ten times adamw's."
    )
    weight_decay_rate: float = flag(0.01, "Decoupled; not on biases and layer norms (RoBERTa's 0.01).")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(0.98, "Decay of the second moment (RoBERTa's 0.98: steadier than 0.999).")
    adam_epsilon: float = flag(1e-6, "Keeps the division by the second moment's root finite (RoBERTa's 1e-6).")
    max_grad_norm: float = flag(1.0, "Gradients are scaled down to this global norm; 0 turns it off.")

    def __post_init__(self) -> None:
        counts = "per_replica_batch_size gradient_accumulation_steps global_batch_size num_epochs max_steps"
        require_each(self, counts, lambda value: value >= 1, "must be at least 1")
        is_said_once = self.global_batch_size is None or self.gradient_accumulation_steps == 1
        rule = "follows from --global-batch-size; leave one out, or give 1 where a preset sets it"
        require(is_said_once, rule, "--gradient-accumulation-steps", self.gradient_accumulation_steps)
        require_each(self, "learning_rate adam_epsilon", lambda value: value > 0, "must be above 0")
        not_negative = "warmup_steps weight_decay_rate max_grad_norm"
        require_each(self, not_negative, lambda value: value >= 0, "must not be negative")
        shares = "warmup_ratio min_learning_rate_ratio adam_beta1 adam_beta2"
        require_each(self, shares, lambda value: 0 <= value < 1, "must be at least 0 and below 1")
        require_each(self, "decay_ratio", lambda value: 0 < value <= 1, "must be above 0 and at most 1")
        require(
            self.min_learning_rate_ratio == 0 or self.schedule in ("linear", "cosine", "wsd"),
            "needs a --schedule that ends at it: linear, cosine or wsd",
            "--min-learning-rate-ratio",
            f"{self.min_learning_rate_ratio} with {self.schedule}",
        )


@dataclass(frozen=True)
class HardwareConfig:
    """What the run computes on: the TPU that is named, else the GPUs there are, else the CPU."""

    tpu_name: str | None = changeable(None, "TPU to train on: `local` on a TPU VM, else its name or grpc:// address.")
    tpu_zone: str | None = changeable(None, "Zone of a TPU given by name.")
    gcp_project: str | None = changeable(None, "Google Cloud project of a TPU given by name.")
    no_tpu: bool = changeable(False, "Do not use a TPU, whatever --tpu-name says.")
    bfloat16: bool = flag(False, "Compute in bfloat16, by XLA; weights, optimizer and loss stay float32.")
    jit_compile: bool | None = changeable(
        None,
        "Compile the step with XLA; by default on TPU and GPU, for --bfloat16, and on one CPU for runs long enough to "
        "make up for the time that compiling takes. A run that resumes on the same hardware computes as it did.",
        ROUNDING,
    )
    tpu_layers: Literal["auto", "on", "off"] = changeable(
        "auto",
        "Compute attention as XLA does it cheapest on a TPU, with the same weights and results: about a third fewer "
        "cycles for a roberta-base; for ModernBERT, BERT, RoBERTa and their like. auto: on a TPU, if loss and "
        "gradients of the first rows are those of the stock layers. on: without that check. off: the stock layers.",
        ROUNDING,
    )
    steps_per_execution: int | None = changeable(
        None,
        "Steps that one call from Python makes, at most: it ends where something is logged, evaluated or saved, and "
        "after a second of steps, so that a request to stop is met soon. By default 32 on a TPU, since each call costs "
        "its host a millisecond or more in which it may wait; 1 elsewhere, where a call costs little beside its step.",
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

    output_dir: str | None = changeable(
        None, "Folder of the run, local or gs://: metrics.jsonl, checkpoints/, export/ …", PER_WORKER
    )
    phases: str | None = changeable(
        None,
        "YAML file of a run that changes on its way: the settings of the whole run, over the preset's, and its phases, "
        "each with its shards, steps and what else is its own (docs/phases.md; complete ones in recipes/).",
        PER_WORKER,
    )
    seed: int = flag(0, "Fixes initial weights, order of rows and masks.")
    log_steps: int | None = changeable(
        None,
        "Write a line of metrics.jsonl every N steps; each reads figures back from the device. Default: a fiftieth of "
        "the run, at most 50.",
    )
    eval_steps: int | None = changeable(
        None, "Evaluate every N steps. Default: at most ten times per run, in at most a tenth of its time."
    )
    save_steps: int | None = changeable(
        None, "Save a checkpoint every N steps. Default: at each evaluation if --eval-steps is given, else ten per run."
    )
    save_minutes: float | None = changeable(
        None, "Minutes after which a checkpoint is saved besides; by default 15 on a TPU, else never. 0 turns it off."
    )
    keep_checkpoints: int = changeable(
        2,
        "Newest checkpoints that are kept; 2, so that a damaged one is no loss. The one of the lowest validation loss "
        "is kept besides.",
    )
    resume: Literal["auto", "must", "never"] = changeable(
        "auto",
        "Resume from the newest checkpoint in --output-dir: where this very run left one (auto); or fail (must). never "
        "wants a folder without a run.",
    )
    overwrite_output_dir: bool = changeable(
        False, "Delete the run in --output-dir, whichever it is, and start anew. Files that no run writes stay."
    )
    on_nonfinite: Literal["stop", "skip"] = changeable(
        "stop",
        "What follows a loss or gradient that is not finite, or a loss that rises too far: the end of the run, or the "
        "last checkpoint before it and training without the rows since then.",
    )
    max_loss_rise: float | None = changeable(
        None, "Nats by which a line's loss may exceed the median of the five lines before; by default any number."
    )
    max_rollbacks: int = changeable(3, "With --on-nonfinite skip: how often in a run; then it stops.")
    supervise: bool = changeable(
        False,
        "Train in a process of its own, and start it again after a crash, a lost TPU or a machine's maintenance; it "
        "resumes from the newest checkpoint.",
    )
    stall_minutes: float = changeable(
        30.0, "With --supervise: a training process that shows no progress for so long is killed, and started again."
    )
    max_retries: int = changeable(
        5, "With --supervise: starts in a row that may end without a step further than before; then it gives up."
    )
    retry_seconds: float = changeable(10.0, "With --supervise: wait before the first of these starts; each doubles it.")
    profile: str | None = changeable(
        None, "START:STOP: trace the steps after START up to STOP for TensorBoard's profiler, say 100:105."
    )
    dry_run: bool = changeable(False, "Stop after all checks, with the plan printed.")

    def __post_init__(self) -> None:
        counts = "log_steps eval_steps save_steps keep_checkpoints"
        require_each(self, counts, lambda value: value >= 1, "must be at least 1")
        above_0 = "stall_minutes retry_seconds max_loss_rise"
        require_each(self, above_0, lambda value: value > 0, "must be above 0")
        require_each(self, "save_minutes max_retries max_rollbacks", lambda value: value >= 0, "must not be negative")
        require_each(self, "seed", lambda value: 0 <= value < 2**31, "must lie in 0 to 2147483647")
        is_contradictory = self.overwrite_output_dir and self.resume == "must"
        require(not is_contradictory, "and --resume must must not both be given", "--overwrite-output-dir", "both")
        start, _, stop = (self.profile or "0:1").partition(":")
        holds = start.isdecimal() and stop.isdecimal() and int(start) < int(stop)
        require(holds, "must be START:STOP, two numbers of steps with START below STOP", "--profile", self.profile)

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

    hub_model_id: str | None = changeable(None, "USER/NAME on the Hub that the export is pushed to.", PUBLIC)
    hub_private: bool = changeable(False, "Make the Hub's repository private when it is created.")
    hub_revision: str | None = changeable(
        None,
        "Branch that is pushed to, made without files where it is missing; by default main, which others load.",
        PUBLIC,
    )
    hub_tag: str | None = changeable(None, "Name of a tag that the commit of the last push gets.", PUBLIC)
    hub_strategy: Literal["end", "epoch", "steps", "checkpoint"] = changeable(
        "end",
        "When to push: after the last step; also after each pass over the rows; also every --push-steps steps; or "
        "with each of these the newest checkpoint of the training, too, to the branch `checkpoints`. Training runs on "
        "meanwhile, and a push that is late is skipped for a newer one.",
    )
    push_steps: int | None = changeable(
        None, "Steps between two pushes of --hub-strategy steps or checkpoint; by default as between checkpoints."
    )
    resume_from_hub: bool = changeable(
        False,
        "Where --output-dir holds no run, resume from the checkpoint that --hub-strategy checkpoint put on the Hub.",
    )
    publish_details: bool = changeable(
        False,
        "Push the records of --hub-strategy checkpoint as they are: run.json and the checkpoint's have the paths of "
        "shards, run and corpus, names of buckets, and project, name and zone of the TPU. By default these are "
        "withheld.",
    )
    hub_license: str | None = changeable(
        None, "License of the model, for its card, as the Hub calls it: apache-2.0, mit, cc-by-4.0 …", PUBLIC
    )
    hub_language: list[str] = changeable(
        list, "Languages of the corpus, for the card: ISO 639 codes such as en de, or multilingual.", PUBLIC
    )
    hub_example: str = changeable(
        f"The capital of France is {MASK}.",
        f"Sentence in the card's lines of code, with {MASK} for the mask token.",
        PUBLIC,
    )

    def __post_init__(self) -> None:
        require_each(self, "push_steps", lambda value: value >= 1, "must be at least 1")
        is_by_steps = self.push_steps is None or self.hub_strategy in ("steps", "checkpoint")
        require(is_by_steps, "needs --hub-strategy steps or checkpoint", "--push-steps", self.hub_strategy)
        if self.hub_model_id is None:
            without = "hub_revision hub_tag hub_strategy resume_from_hub"
            require_each(self, without, lambda value: value in ("end", False), "needs --hub-model-id")
        require(self.hub_example.count(MASK) == 1, f"must have one {MASK}", "--hub-example", repr(self.hub_example))

    def repository(self) -> HubRepository | None:
        """Build what is pushed to, None when nothing is."""
        if self.hub_model_id is None:
            return None
        branch, private = self.hub_revision or MAIN_BRANCH, self.hub_private
        return HubRepository(self.hub_model_id, private=private, branch=branch, tag=self.hub_tag, former=FORMER_PUSH)


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
    return sorted(spelled(name.partition(".")[2]) for name in settings_marked(mark, config_class))
