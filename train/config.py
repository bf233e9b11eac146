"""Settings of stage 3, one frozen dataclass per subject; every field is a flag of `run_mlm.py`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tokenizer_training.command_line import InputError, parse_arguments
from train.presets import preset_settings

TPU_STEPS_PER_LAUNCH = 32


def _flag(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text.replace("%", "%%")})  # argparse formats its help


def _require(holds: bool, rule: str, flag: str, received: object) -> None:
    if not holds:
        raise InputError(f"{flag} {rule}; received {received}.")


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from; length, vocabulary and special ids are read from the shards' manifest."""

    train_dataset: str | None = _flag(None, "Folder of training shards, local or gs:// (OUTPUT_DIR/train of stage 2).")
    eval_dataset: str | None = _flag(None, "Folder of validation shards; without it nothing is evaluated.")
    tokenizer: str | None = _flag(
        None, "Folder or Hub id of the tokenizer; by default the one that stage 2 saved with the training shards."
    )
    max_length: int | None = _flag(None, "Tokens a row; read from the shards, so only checked against them.")
    shuffle_buffer_size: int = _flag(
        2**15, "Rows held in memory and permuted together; whole shards are permuted before, so it need not be large."
    )

    def __post_init__(self) -> None:
        _require(
            self.shuffle_buffer_size >= 1, "must be at least 1 row", "--shuffle-buffer-size", self.shuffle_buffer_size
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    preset: str = _flag(
        "roberta-base", "A file of train/presets/ by name: model and training settings; any flag given wins over it."
    )
    pretrained_model_config: str | None = _flag(
        None, "Hub id or folder whose config.json gives the architecture, in the place of the preset's model."
    )
    init_from: str | None = _flag(
        None,
        "Continue from this checkpoint: a folder (local or gs://) or Hub id with config.json, the tokenizer of the "
        "shards, and weights in safetensors or TensorFlow's h5. The preset then gives the training settings only.",
    )
    config_overrides: str | None = _flag(
        None, "Changes to the model's configuration: num_hidden_layers=4,hidden_act=gelu_new"
    )
    position_init: Literal["random", "sinusoidal"] = _flag(
        "random",
        "How a table of learned positions starts: random as in BERT, or as sinusoids, with which a small model learns "
        "from neighbours sooner.",
    )
    dropout: float | None = _flag(
        None, "Dropout of hidden states and of attention, whatever the configuration says; the export records it."
    )
    recompute: bool = _flag(
        False, "Compute each layer again in the backward pass: a third more computing, far less memory for activations."
    )
    pad_vocab_to_multiple_of: int = _flag(
        128,
        "Fill the model's vocabulary up to a multiple of this, the width of a TPU's lanes; the export has the "
        "tokenizer's own. 1 turns it off.",
    )

    def __post_init__(self) -> None:
        _require(
            self.dropout is None or 0 <= self.dropout < 1, "must be at least 0 and below 1", "--dropout", self.dropout
        )
        _require(
            self.pad_vocab_to_multiple_of >= 1,
            "must be at least 1",
            "--pad-vocab-to-multiple-of",
            self.pad_vocab_to_multiple_of,
        )


@dataclass(frozen=True)
class MaskingConfig:
    """How tokens are masked in training; evaluation always masks 15 %, so that runs compare."""

    masking: Literal["token", "whole_word", "span"] = _flag(
        "token", "What is masked as a whole: tokens (BERT), words, or spans of words (SpanBERT); the share is the same."
    )
    mlm_probability: float = _flag(0.15, "Share of the tokens that are predicted (BERT's 0.15; up to 0.4 can help).")
    mask_token_rate: float = _flag(0.8, "Share of the predicted tokens that are replaced by the mask token (BERT's).")
    random_token_rate: float = _flag(0.1, "Share of the predicted tokens that are replaced by a random one (BERT's).")

    def __post_init__(self) -> None:
        for name in ("mlm_probability", "mask_token_rate", "random_token_rate"):
            value = getattr(self, name)
            _require(0 <= value <= 1, "must lie in 0 to 1", f"--{name.replace('_', '-')}", value)
        _require(self.mlm_probability > 0, "must be above 0, or nothing is learned", "--mlm-probability", 0)
        replaced = self.mask_token_rate + self.random_token_rate
        _require(replaced <= 1 + 1e-9, "must sum to at most 1", "--mask-token-rate and --random-token-rate", replaced)


@dataclass(frozen=True)
class OptimizationConfig:
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: int = _flag(8, "Rows a replica takes at once; lower it when memory is short.")
    gradient_accumulation_steps: int = _flag(1, "Batches whose gradients are summed before one update.")
    num_epochs: int = _flag(1, "Passes over the training rows.")
    max_steps: int | None = _flag(None, "Updates to make, in the place of --num-epochs.")
    learning_rate: float = _flag(1e-4, "Peak, after the warmup; 1e-4 is safe for roberta-base at any batch size.")
    schedule: Literal["linear", "cosine", "inverse_sqrt", "wsd", "constant"] = _flag(
        "linear",
        "The rate after the warmup: falls in a line (BERT's) or half a cosine to its end; as 1/sqrt of the update, "
        "whatever the length of the run; stays at the peak and falls in the last part (wsd); stays at the peak.",
    )
    warmup_ratio: float = _flag(
        0.05, "Share of the updates over which the rate rises from 0 (RoBERTa's 0.05, BERT's 0.01)."
    )
    warmup_steps: int | None = _flag(None, "Updates of the warmup, in the place of --warmup-ratio.")
    decay_ratio: float = _flag(
        0.2, "Share of the updates over which wsd falls; 0.2 ends as low as a cosine (Hägele et al. 2024)."
    )
    min_learning_rate_ratio: float = _flag(
        0.0, "Share of the peak at which linear, cosine and wsd end; 0 gives the lowest loss at the end of a run."
    )
    optimizer: Literal["adamw", "lamb"] = _flag(
        "adamw", "adamw, or lamb for global batches of thousands of rows, with a rate of about ten times adamw's."
    )
    weight_decay_rate: float = _flag(0.01, "Decoupled; not on biases and layer norms (RoBERTa's 0.01).")
    adam_beta1: float = _flag(0.9, "Decay of the first moment.")
    adam_beta2: float = _flag(0.98, "Decay of the second moment (RoBERTa's 0.98: steadier than 0.999).")
    adam_epsilon: float = _flag(1e-6, "Keeps the division by the second moment's root finite (RoBERTa's 1e-6).")
    max_grad_norm: float = _flag(1.0, "Gradients are scaled down to this global norm; 0 turns it off.")

    def __post_init__(self) -> None:
        for name in ("per_replica_batch_size", "gradient_accumulation_steps", "num_epochs"):
            _require(getattr(self, name) >= 1, "must be at least 1", f"--{name.replace('_', '-')}", getattr(self, name))
        _require(self.max_steps is None or self.max_steps >= 1, "must be at least 1", "--max-steps", self.max_steps)
        _require(self.learning_rate > 0, "must be above 0", "--learning-rate", self.learning_rate)
        for name in ("warmup_steps", "weight_decay_rate", "max_grad_norm"):
            value = getattr(self, name)
            _require(value is None or value >= 0, "must not be negative", f"--{name.replace('_', '-')}", value)
        for name in ("warmup_ratio", "min_learning_rate_ratio", "adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, "must be at least 0 and below 1", f"--{name.replace('_', '-')}", value)
        _require(0 < self.decay_ratio <= 1, "must be above 0 and at most 1", "--decay-ratio", self.decay_ratio)
        _require(self.adam_epsilon > 0, "must be above 0", "--adam-epsilon", self.adam_epsilon)
        _require(
            self.min_learning_rate_ratio == 0 or self.schedule in ("linear", "cosine", "wsd"),
            "needs a --schedule that ends at it: linear, cosine or wsd",
            "--min-learning-rate-ratio",
            f"{self.min_learning_rate_ratio} with {self.schedule}",
        )


@dataclass(frozen=True)
class HardwareConfig:
    """What the run computes on: the TPU that is named, else the GPUs there are, else the CPU."""

    tpu_name: str | None = _flag(None, "TPU to train on: `local` on a TPU VM, else its name or grpc:// address.")
    tpu_zone: str | None = _flag(None, "Zone of a TPU given by name.")
    gcp_project: str | None = _flag(None, "Google Cloud project of a TPU given by name.")
    no_tpu: bool = _flag(False, "Do not use a TPU, whatever --tpu-name says.")
    bfloat16: bool = _flag(False, "Compute in bfloat16; weights, optimizer and loss stay float32.")
    jit_compile: bool | None = _flag(
        None, "Compile the step with XLA; by default on TPU and GPU (on the CPU the step is slower with it)."
    )
    tpu_layers: bool | None = _flag(
        None,
        "Compute attention as XLA does it cheapest on a TPU, with the same weights and results: about a third fewer "
        "cycles for a roberta-base. By default on TPUs; for BERT, RoBERTa and what is built like them.",
    )
    steps_per_execution: int | None = _flag(
        None,
        "Updates a launch, at most: a launch ends where something is logged, evaluated or saved. By default 32 on a "
        "TPU, since each launch costs its host a millisecond or more in which it may wait; 1 elsewhere, where a launch "
        "costs little beside its update.",
    )

    def __post_init__(self) -> None:
        value = self.steps_per_execution
        _require(value is None or value >= 1, "must be at least 1", "--steps-per-execution", value)

    @property
    def wants_tpu(self) -> bool:
        """Whether a TPU is asked for."""
        return self.tpu_name is not None and not self.no_tpu

    @property
    def max_steps_per_launch(self) -> int:
        """Updates that one launch may make."""
        return self.steps_per_execution or (TPU_STEPS_PER_LAUNCH if self.wants_tpu else 1)


@dataclass(frozen=True)
class RunConfig:
    """Where the run writes, how often, and its seed."""

    output_dir: str | None = _flag(None, "Folder of the run, local or gs://: metrics.jsonl, checkpoints/, export/ …")
    seed: int = _flag(0, "Fixes initial weights, order of rows and masks.")
    log_steps: int = _flag(50, "Updates between two lines of metrics.jsonl; each reads metrics back from the device.")
    eval_steps: int | None = _flag(None, "Updates between two evaluations; by default ten in a run.")
    save_steps: int | None = _flag(None, "Updates between two checkpoints; by default at each evaluation.")
    keep_checkpoints: int = _flag(2, "Newest checkpoints that are kept; 2, so that a damaged one is no loss.")
    overwrite_output_dir: bool = _flag(False, "Delete what another run left in --output-dir and start anew.")
    profile: str | None = _flag(
        None, "START:STOP: trace the updates after START up to STOP for TensorBoard's profiler, say 100:105."
    )
    dry_run: bool = _flag(False, "Stop after all checks, with the plan printed.")
    hub_model_id: str | None = _flag(None, "USER/NAME on the Hub that the export is pushed to at the end.")
    hub_private: bool = _flag(False, "Make the Hub's repository private when it is created.")

    def __post_init__(self) -> None:
        for name in ("log_steps", "eval_steps", "save_steps", "keep_checkpoints"):
            value = getattr(self, name)
            _require(value is None or value >= 1, "must be at least 1", f"--{name.replace('_', '-')}", value)
        _require(0 <= self.seed < 2**31, "must lie in 0 to 2147483647", "--seed", self.seed)
        start, _, stop = (self.profile or "0:1").partition(":")
        holds = start.isdecimal() and stop.isdecimal() and int(start) < int(stop)
        _require(holds, "must be START:STOP, two numbers of updates with START below STOP", "--profile", self.profile)

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The updates after which a trace begins and ends; None without one."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        return int(start), int(stop)


@dataclass(frozen=True)
class TrainingConfig:
    """All settings of one run."""

    data: DataConfig
    model: ModelConfig
    masking: MaskingConfig
    optimization: OptimizationConfig
    hardware: HardwareConfig
    run: RunConfig

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the settings as plain values, subject by subject, in the order of the fields."""
        return asdict(self)


SUBJECTS = (DataConfig, ModelConfig, MaskingConfig, OptimizationConfig, HardwareConfig, RunConfig)


def parse_training_config(argv: Sequence[str] | None, description: str) -> TrainingConfig:
    """Return the settings given on the command line, over `--config-file`, over the preset, over the defaults.

    Raises:
        InputError: a setting is not what it must be, or a required one is missing.
    """
    config = TrainingConfig(*parse_arguments(SUBJECTS, argv, description, preset_settings))
    _require(bool(config.data.train_dataset), "is required: a folder of shards", "--train-dataset", "nothing")
    _require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    return config
