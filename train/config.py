"""Settings of stage 3, one frozen dataclass per subject; every field is a flag of `run_mlm.py`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tokenizer_training.command_line import parse_arguments
from train.config_fields import flag, require
from train.hub_config import HubConfig
from train.optimization_config import OptimizationConfig
from train.presets import preset_settings
from train.run_config import RunConfig

TPU_STEPS_PER_LAUNCH = 32


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from; length, vocabulary and special ids are read from the shards' manifest."""

    train_dataset: str | None = flag(None, "Folder of training shards, local or gs:// (OUTPUT_DIR/train of stage 2).")
    eval_dataset: str | None = flag(None, "Folder of validation shards; without it nothing is evaluated.")
    tokenizer: str | None = flag(
        None, "Folder or Hub id of the tokenizer; by default the one that stage 2 saved with the training shards."
    )
    max_length: int | None = flag(None, "Tokens a row; read from the shards, so only checked against them.")
    shuffle_buffer_size: int = flag(
        2**15, "Rows held in memory and permuted together; whole shards are permuted before, so it need not be large."
    )

    def __post_init__(self) -> None:
        require(
            self.shuffle_buffer_size >= 1, "must be at least 1 row", "--shuffle-buffer-size", self.shuffle_buffer_size
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    preset: str = flag(
        "roberta-base", "A file of train/presets/ by name: model and training settings; any flag given wins over it."
    )
    pretrained_model_config: str | None = flag(
        None, "Hub id or folder whose config.json gives the architecture, in the place of the preset's model."
    )
    init_from: str | None = flag(
        None,
        "Continue from this checkpoint: a folder (local or gs://) or Hub id with config.json, the tokenizer of the "
        "shards, and weights in safetensors or TensorFlow's h5. The preset then gives the training settings only.",
    )
    config_overrides: str | None = flag(
        None, "Changes to the model's configuration: num_hidden_layers=4,hidden_act=gelu_new"
    )
    position_init: Literal["random", "sinusoidal"] = flag(
        "random",
        "How a table of learned positions starts: random as in BERT, or as sinusoids, with which a small model learns "
        "from neighbours sooner.",
    )
    dropout: float | None = flag(
        None, "Dropout of hidden states and of attention, whatever the configuration says; the export records it."
    )
    recompute: bool = flag(
        False, "Compute each layer again in the backward pass: a third more computing, far less memory for activations."
    )
    pad_vocab_to_multiple_of: int = flag(
        128,
        "Fill the model's vocabulary up to a multiple of this, the width of a TPU's lanes; the export has the "
        "tokenizer's own. 1 turns it off.",
    )

    def __post_init__(self) -> None:
        require(
            self.dropout is None or 0 <= self.dropout < 1, "must be at least 0 and below 1", "--dropout", self.dropout
        )
        require(
            self.pad_vocab_to_multiple_of >= 1,
            "must be at least 1",
            "--pad-vocab-to-multiple-of",
            self.pad_vocab_to_multiple_of,
        )


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
        for name in ("mlm_probability", "mask_token_rate", "random_token_rate"):
            value = getattr(self, name)
            require(0 <= value <= 1, "must lie in 0 to 1", f"--{name.replace('_', '-')}", value)
        require(self.mlm_probability > 0, "must be above 0, or nothing is learned", "--mlm-probability", 0)
        replaced = self.mask_token_rate + self.random_token_rate
        require(replaced <= 1 + 1e-9, "must sum to at most 1", "--mask-token-rate and --random-token-rate", replaced)


@dataclass(frozen=True)
class HardwareConfig:
    """What the run computes on: the TPU that is named, else the GPUs there are, else the CPU."""

    tpu_name: str | None = flag(None, "TPU to train on: `local` on a TPU VM, else its name or grpc:// address.")
    tpu_zone: str | None = flag(None, "Zone of a TPU given by name.")
    gcp_project: str | None = flag(None, "Google Cloud project of a TPU given by name.")
    no_tpu: bool = flag(False, "Do not use a TPU, whatever --tpu-name says.")
    bfloat16: bool = flag(False, "Compute in bfloat16; weights, optimizer and loss stay float32.")
    jit_compile: bool | None = flag(
        None,
        "Compile the step with XLA; by default on TPU and GPU. On one CPU it takes half a minute, "
        "and updates are up to a third faster.",
    )
    tpu_layers: bool | None = flag(
        None,
        "Compute attention as XLA does it cheapest on a TPU, with the same weights and results: about a third fewer "
        "cycles for a roberta-base. By default on TPUs; for BERT, RoBERTa and what is built like them.",
    )
    steps_per_execution: int | None = flag(
        None,
        "Updates a launch, at most: a launch ends where something is logged, evaluated or saved. By default 32 on a "
        "TPU, since each launch costs its host a millisecond or more in which it may wait; 1 elsewhere, where a launch "
        "costs little beside its update.",
    )

    def __post_init__(self) -> None:
        value = self.steps_per_execution
        require(value is None or value >= 1, "must be at least 1", "--steps-per-execution", value)

    @property
    def wants_tpu(self) -> bool:
        """Whether a TPU is asked for."""
        return self.tpu_name is not None and not self.no_tpu

    @property
    def max_steps_per_launch(self) -> int:
        """Updates that one launch may make."""
        return self.steps_per_execution or (TPU_STEPS_PER_LAUNCH if self.wants_tpu else 1)


@dataclass(frozen=True)
class TrainingConfig:
    """All settings of one run."""

    data: DataConfig
    model: ModelConfig
    masking: MaskingConfig
    optimization: OptimizationConfig
    hardware: HardwareConfig
    run: RunConfig
    hub: HubConfig = field(default_factory=HubConfig)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the settings as plain values, subject by subject, in the order of the fields."""
        return asdict(self)


SUBJECTS = (DataConfig, ModelConfig, MaskingConfig, OptimizationConfig, HardwareConfig, RunConfig, HubConfig)


def parse_training_config(argv: Sequence[str] | None, description: str) -> TrainingConfig:
    """Return the settings given on the command line, over `--config-file`, over the preset, over the defaults.

    Raises:
        InputError: a setting is not what it must be, or a required one is missing.
    """
    config = TrainingConfig(*parse_arguments(SUBJECTS, argv, description, preset_settings))
    require(bool(config.data.train_dataset), "is required: a folder of shards", "--train-dataset", "nothing")
    require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    return config
