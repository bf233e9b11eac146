"""Settings of what a run computes on."""

from dataclasses import dataclass
from typing import Literal

from mlm_common.cli.settings import Bounded, flag, require
from train import multiplies_in_bfloat16
from train.config.learning import ROUNDING, changeable

# Steps of one call from Python on a TPU; a call costs its host a millisecond or more in which it may wait.
TPU_STEPS_PER_EXECUTION = 32


@dataclass(frozen=True)
class HardwareConfig(Bounded):
    """What the run computes on: the TPU that is named, else the GPUs there are, else the CPU."""

    FLAG_GROUP = "Hardware"

    tpu_name: str | None = changeable(
        None, "TPU to train on: local on a TPU VM, otherwise its name or grpc:// address.", is_usual=True
    )
    tpu_zone: str | None = changeable(None, "Zone of a TPU given by name.")
    gcp_project: str | None = changeable(None, "Google Cloud project of a TPU given by name.")
    no_tpu: bool = changeable(False, "Do not use a TPU, even if --tpu-name is given.")
    runtime: Literal["auto", "tensorflow", "jax"] = changeable(
        "auto",
        "What executes TensorFlow's step on the devices: TensorFlow, or JAX, which reaches TPUs and GPUs that the "
        "installed TensorFlow does not. auto: TensorFlow where it has the device, else JAX.",
        ROUNDING,
    )
    bfloat16: bool = flag(
        False,
        "Compute in bfloat16; on CPUs that have instructions for it only matrix products, which is faster without XLA. "
        "Weights, optimizer and loss stay in float32.",
    )
    pjrt: Literal["auto", "on", "off"] = changeable(
        "auto",
        "Settings that show a local TPU to TensorFlow as a PJRT device. auto: from v5e on, if a trial in a process of "
        "its own finds the TPU with them. on: on older ones, too, and the trial must succeed. off: never.",
    )
    jit_compile: bool | None = changeable(
        None,
        "Compile the step with XLA. Default: true on TPU and GPU, and with --bfloat16 on CPUs without instructions for "
        "it. A resumed run on the same hardware computes as before.",
        ROUNDING,
    )
    tpu_layers: Literal["auto", "on", "off"] = changeable(
        "auto",
        "TPU-optimized attention with the same weights and results: about a third fewer cycles for roberta-base. "
        "For ModernBERT, BERT, RoBERTa and similar models. auto: on a TPU, if loss and gradients of the first "
        "rows match those of the reference layers. on: without that check. off: the reference layers.",
        ROUNDING,
    )
    shard_optimizer: bool = changeable(
        False,
        "Divide the optimizer's moments and the update of the weights among the replicas (ZeRO-1): less memory, fewer "
        "cycles. Checkpoints stay the same. On a TPU, the first rows are used to compare a step with it to one without "
        "it; if they differ, the run trains without it.",
        ROUNDING,
    )
    steps_per_execution: int | None = changeable(
        None,
        "Steps per call from Python, at most; a call also ends where something is logged, evaluated or saved, and "
        "after about a second. Default: 32 on a TPU, where each call costs a millisecond or more; 1 elsewhere.",
        at_least=1,
    )

    modelled_step_ms: float | None = changeable(
        None,
        "Milliseconds that tpu_preflight.py models for a step. A run on a TPU prints at its end what it has measured "
        "beside them.",
        metavar="MS",
        above=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        compiles = self.jit_compile is not False
        require(compiles or self.runtime != "jax", "must not be false with --runtime jax", "--jit-compile", False)
        if self.wants_tpu or compiles:
            return
        require(self.tpu_layers != "on", "must not be false with --tpu-layers on", "--jit-compile", False)
        rule = "must not be false with --bfloat16, except on CPUs with avx512_bf16 or amx_bf16"
        require(not self.bfloat16 or multiplies_in_bfloat16(), rule, "--jit-compile", False)

    @property
    def wants_tpu(self) -> bool:
        return self.tpu_name is not None and not self.no_tpu

    @property
    def has_own_xla(self) -> bool:
        """Whether the replicas are XLA's own: sums over them are operations of the program."""
        return self.wants_tpu or self.runtime == "jax"

    @property
    def max_steps_per_execution(self) -> int:
        return self.steps_per_execution or (TPU_STEPS_PER_EXECUTION if self.wants_tpu else 1)
