"""Settings of the batch, the optimizer and the learning rate."""

from dataclasses import dataclass
from typing import Literal

from train.config_fields import flag, require


@dataclass(frozen=True)
class OptimizationConfig:
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: int = flag(8, "Rows a replica takes at once; lower it when memory is short.")
    gradient_accumulation_steps: int = flag(1, "Batches whose gradients are summed before one update.")
    num_epochs: int = flag(1, "Passes over the training rows.")
    max_steps: int | None = flag(None, "Updates to make, in the place of --num-epochs.")
    learning_rate: float = flag(1e-4, "Peak, after the warmup; 1e-4 is safe for roberta-base at any batch size.")
    schedule: Literal["linear", "cosine", "inverse_sqrt", "wsd", "constant"] = flag(
        "linear",
        "The rate after the warmup: falls in a line (BERT's) or half a cosine to its end; as 1/sqrt of the update, "
        "whatever the length of the run; stays at the peak and falls in the last part (wsd); stays at the peak.",
    )
    warmup_ratio: float = flag(
        0.05, "Share of the updates over which the rate rises from 0 (RoBERTa's 0.05, BERT's 0.01)."
    )
    warmup_steps: int | None = flag(None, "Updates of the warmup, in the place of --warmup-ratio.")
    decay_ratio: float = flag(
        0.2, "Share of the updates over which wsd falls; 0.2 ends as low as a cosine (Hägele et al. 2024)."
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
        for name in ("per_replica_batch_size", "gradient_accumulation_steps", "num_epochs"):
            require(getattr(self, name) >= 1, "must be at least 1", f"--{name.replace('_', '-')}", getattr(self, name))
        require(self.max_steps is None or self.max_steps >= 1, "must be at least 1", "--max-steps", self.max_steps)
        require(self.learning_rate > 0, "must be above 0", "--learning-rate", self.learning_rate)
        for name in ("warmup_steps", "weight_decay_rate", "max_grad_norm"):
            value = getattr(self, name)
            require(value is None or value >= 0, "must not be negative", f"--{name.replace('_', '-')}", value)
        for name in ("warmup_ratio", "min_learning_rate_ratio", "adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, "must be at least 0 and below 1", f"--{name.replace('_', '-')}", value)
        require(0 < self.decay_ratio <= 1, "must be above 0 and at most 1", "--decay-ratio", self.decay_ratio)
        require(self.adam_epsilon > 0, "must be above 0", "--adam-epsilon", self.adam_epsilon)
        require(
            self.min_learning_rate_ratio == 0 or self.schedule in ("linear", "cosine", "wsd"),
            "needs a --schedule that ends at it: linear, cosine or wsd",
            "--min-learning-rate-ratio",
            f"{self.min_learning_rate_ratio} with {self.schedule}",
        )
