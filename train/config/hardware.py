"""Settings of a run's hardware, and of the computation on this hardware."""

from dataclasses import dataclass
from typing import Literal

from mlm_common.cli.settings import Bounded, flag, require
from train import multiplies_in_bfloat16
from train.config import Changeable, Rounding

# Steps per call from Python on a TPU, where each call costs the host a millisecond or more.
TPU_STEPS_PER_EXECUTION = 32


@dataclass(frozen=True)
class HardwareConfig(Bounded):
    """The hardware of a run: the TPU of `--tpu-name`, else the GPUs if there are any, else the CPU."""

    FLAG_GROUP = "Hardware"

    tpu_name: Changeable[str | None] = flag(
        None, "TPU to train on: local on a TPU VM, otherwise its name or grpc:// address.", is_usual=True
    )
    tpu_zone: Changeable[str | None] = flag(None, "Zone of a TPU given by name.")
    gcp_project: Changeable[str | None] = flag(None, "Google Cloud project of a TPU given by name.")
    no_tpu: Changeable[bool] = flag(False, "Do not use a TPU, even if --tpu-name is given.")
    runtime: Rounding[Literal["auto", "tensorflow", "jax"]] = flag(
        "auto",
        "Library that executes the training step: TensorFlow, or JAX, which supports TPUs and GPUs that the installed "
        "TensorFlow does not. auto: TensorFlow if it supports the device, else JAX.",
    )
    bfloat16: bool = flag(
        False,
        "Compute in bfloat16. Weights, optimizer and loss stay in float32. On CPUs with instructions for bfloat16, by "
        "default only matrix products use it, and XLA is off, which is faster.",
    )
    pjrt: Changeable[Literal["auto", "on", "off"]] = flag(
        "auto",
        "Whether TensorFlow uses a local TPU as a PJRT device. auto: on TPU v5e and later, if a trial in a separate "
        "process finds the TPU that way. on: also on older TPUs; the trial must succeed. off: never.",
    )
    jit_compile: Rounding[bool | None] = flag(
        None,
        "Compile the step with XLA. Default: true on TPU and GPU, and with --bfloat16 on CPUs without instructions for "
        "it. A run that resumes on the same hardware keeps what it used before.",
    )
    tpu_layers: Rounding[Literal["auto", "on", "off"]] = flag(
        "auto",
        "TPU-optimized attention with the same weights and results: about a third fewer cycles for roberta-base. "
        "For ModernBERT, BERT, RoBERTa and similar models. auto: on a TPU, if loss and gradients of the first "
        "rows match those of the reference layers. on: without that check. off: the reference layers.",
    )
    reference_layers: Rounding[bool] = flag(
        False,
        "Compute BERT, RoBERTa and similar models with transformers' TensorFlow classes instead of our layers, to "
        "compare the two. Weights are the same, also random ones. Needs transformers 4: python3 install.py --with "
        "legacy.",
    )
    shard_optimizer: Rounding[bool] = flag(
        False,
        "Divide the optimizer's moments and the update of the weights among the replicas (ZeRO-1): less memory, fewer "
        "cycles. Checkpoints stay the same. On a TPU, the run first compares a sharded step with an unsharded one, and "
        "trains without sharding if they differ.",
    )
    modelled_step_ms: Changeable[float | None] = flag(
        None,
        "Milliseconds per step that tpu_preflight.py estimates. A run on a TPU prints them at its end, next to the "
        "measured time.",
        metavar="MS",
        above=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        compiles = self.jit_compile is not False
        require(compiles or self.runtime != "jax", "must not be false with --runtime jax", "--jit-compile", False)
        if self.reference_layers:
            rule = "must not be on with --reference-layers, whose classes have none"
            require(self.tpu_layers != "on", rule, "--tpu-layers", "on")
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
        """Whether XLA knows the replicas, so that sums over replicas are operations of the compiled program."""
        return self.wants_tpu or self.runtime == "jax"

    @property
    def max_steps_per_execution(self) -> int:
        """Maximum number of steps per call from Python: one, because the next step may have rows of another length."""
        return 1


@dataclass(frozen=True)
class PretrainingHardware(HardwareConfig):
    """The hardware of a pretraining run. All steps of the run have rows of one length."""

    steps_per_execution: Changeable[int | None] = flag(
        None,
        "Maximum number of steps per call from Python. A call also ends where something is logged, evaluated or saved, "
        "and after about a second. Default: 32 on a TPU, where each call costs a millisecond or more; 1 elsewhere.",
        at_least=1,
    )

    @property
    def max_steps_per_execution(self) -> int:
        return self.steps_per_execution or (TPU_STEPS_PER_EXECUTION if self.wants_tpu else 1)
