"""The cost of a model (parameters, and floating-point operations of a step), and how its steps are computed.

Costs are pure arithmetic without TensorFlow, so that a plan can show them.

Operations are counted as for model FLOPs utilization (MFU; Chowdhery et al. 2022, PaLM, appendix B): an addition and a
multiplication for each product in a matrix product, once forward and twice backward. Recomputed activations, softmax,
layer norms and the optimizer do not count. Attention counts in full, because it is not causal. The head counts at the
prediction slots only. Heads for fine-tuning do not count, because they have few outputs.

How a step is computed is decided once, recorded, and kept when a run resumes.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from train import multiplies_in_bfloat16
from train.config.settings import HardwareConfig, RunSettings
from train.model.anatomy import Anatomy, anatomy_of
from train.model.architectures import architecture_of
from train.runtime.machines import CLUSTER_VARIABLE, chip_of, local_accelerator_type
from train.runtime.plan import Plan

# Heads that begin with the encoder's pooler, given by the endings of their classes' names.
POOLED = {
    "bert": ("", "SequenceClassification", "MultipleChoice"),
    **dict.fromkeys(("camembert", "roberta", "roberta-prelayernorm", "xlm-roberta"), ("", "MultipleChoice")),
}

# Streams are used for models with at most this number of weights, because each stream has its own gradients, and if
# each stream gets at least this number of tokens. We measured only two cores.
MAX_STREAM_PARAMETERS = 10_000_000
MIN_STREAM_TOKENS = 512
# Variables with which users set the numbers of TensorFlow's threads.
THREAD_VARIABLES = {"TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"}


@dataclass(frozen=True)
class Parameters:
    """The number of weights, and the number of weights in hidden matrices (`train.model.build.hidden_matrices`)."""

    total: int
    in_matrices: int


def count_parameters(config: PretrainedConfig, model_class: str = "TFAutoModelForMaskedLM") -> Parameters | None:
    """Count the weights of a network, including the vocabulary's padding; None if only the built network shows it.

    `model_class` is the auto class of transformers.
    """
    if not architecture_of(config).is_ours:
        return None
    anatomy = anatomy_of(config)
    hidden, width, num_layers = anatomy.hidden_size, anatomy.embedding_size, anatomy.num_layers
    expansion = anatomy.inner_size * (2 if anatomy.is_gated else 1)
    matrices = 4 * hidden**2 + hidden * (expansion + anatomy.inner_size)
    biases = anatomy.attention_has_bias * 4 * hidden + anatomy.feed_forward_has_bias * (expansion + hidden)
    num_norms = 2 * num_layers + ("final_norm" in anatomy.encoder_names)
    if num_layers and not anatomy.normalizes_first:
        num_norms -= 1
    total = (config.vocab_size + anatomy.num_token_types + anatomy.num_positions) * width + _norm(anatomy, width)
    total += num_layers * (matrices + biases) + num_norms * _norm(anatomy, hidden)
    if width != hidden:
        total += _dense(width, hidden)
    head = _count_head(config, anatomy, model_class.removeprefix("TFAutoModel").removeprefix("For"))
    return head and Parameters(total + head.total, num_layers * matrices + head.in_matrices)


def _count_head(config: PretrainedConfig, anatomy: Anatomy, name: str) -> Parameters | None:
    """Count the weights of a head and of the network's pooler, if it has one; None for an unknown head."""
    kind, hidden = config.model_type, anatomy.hidden_size
    outputs = {
        "": 0,
        "MaskedLM": config.vocab_size * getattr(config, "decoder_bias", True),
        "MultipleChoice": _dense(hidden, 1),
        "QuestionAnswering": _dense(hidden, config.num_labels),
        "SequenceClassification": _dense(hidden, config.num_labels),
        "TokenClassification": _dense(hidden, config.num_labels),
    }
    if kind == "bert":
        outputs["PreTraining"] = config.vocab_size + _dense(hidden, hidden) + _dense(hidden, 2)
    if name not in outputs:
        return None
    is_pooled, predicts_tokens = name in POOLED.get(kind, ()), name in ("MaskedLM", "PreTraining")
    is_modernbert = kind == "modernbert"
    has_transform = predicts_tokens or name in ("SequenceClassification", "MultipleChoice") or (is_modernbert and name)
    if not (has_transform or is_pooled):
        return Parameters(outputs[name], 0)
    width = anatomy.embedding_size if predicts_tokens else hidden
    transform = _dense(hidden, width, getattr(config, "classifier_bias", True))
    if predicts_tokens or is_modernbert:
        transform += _norm(anatomy, width)
    return Parameters(outputs[name] + transform, 0 if is_pooled else hidden * width)


def _dense(num_inputs: int, num_outputs: int, has_bias: bool = True) -> int:
    return (num_inputs + has_bias) * num_outputs


def _norm(anatomy: Anatomy, width: int) -> int:
    return width * (2 if anatomy.norm_has_bias else 1)


@dataclass(frozen=True)
class Multiplications:
    """The number of multiplications in a forward pass.

    Attributes:
        per_token: by weights, for each token.
        per_pair: in attention, for each pair of tokens of a row.
        per_prediction: in the head, for each prediction slot.
        per_pass: independent of the number of rows (relative positions).
    """

    per_token: float
    per_pair: int
    per_prediction: int
    per_pass: int = 0


def step_flops(
    config: PretrainedConfig,
    *,
    num_rows: int,
    length: float,
    num_predictions: int,
    num_micro_batches: int = 1,
) -> int | None:
    """Count the floating-point operations of one step; None if the architecture has no formula.

    Args:
        num_rows: rows of the step, in all micro-batches.
        length: mean length of the rows in tokens, including padding.
        num_predictions: prediction slots of the step, in all micro-batches.
        num_micro_batches: number of forward passes that the rows are divided among.
    """
    formula = architecture_of(config).flops
    if formula is None:
        return None
    forward = FORMULAS[formula](config, length)
    num_tokens = num_rows * length
    multiplications = (
        num_tokens * (forward.per_token + length * forward.per_pair)
        + num_predictions * forward.per_prediction
        + num_micro_batches * forward.per_pass
    )
    return round(3 * 2 * multiplications)


def planned_step_flops(model_config: PretrainedConfig, plan: Plan, num_predictions: int) -> int | None:
    """Count the floating-point operations of a step of the plan; None as in `step_flops`.

    Args:
        num_predictions: prediction slots of a micro-batch; 0 for all heads except masked LM heads.
    """
    num_micro_batches = plan.num_replicas * plan.num_micro_batches
    return step_flops(
        model_config,
        num_rows=plan.global_batch_rows,
        length=plan.mean_length or plan.max_length,
        num_predictions=num_micro_batches * num_predictions,
        num_micro_batches=num_micro_batches,
    )


def full_speed_step_seconds(
    config: RunSettings, model_config: PretrainedConfig, plan: Plan, num_predictions: int
) -> float | None:
    """Return the number of seconds that a step would take at the peak speed of all replicas.

    None if the run does not use a local TPU, if `train.runtime.machines` does not list this TPU, or if the operations
    cannot be counted. The other arguments are the same as in `planned_step_flops`.
    """
    if not config.hardware.wants_tpu or config.hardware.tpu_name != "local":
        return None
    chip = chip_of(local_accelerator_type())
    flops = planned_step_flops(model_config, plan, num_predictions)
    if chip is None or flops is None:
        return None
    return flops / (plan.num_replicas * chip.peak_flops_per_second)


def _bert(config: PretrainedConfig, length: float) -> Multiplications:  # noqa: ARG001
    """Count the multiplications of BERT, RoBERTa, ALBERT, ELECTRA, RemBERT and RoFormer.

    The embeddings of the last four may have another width than the layers.
    """
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    inner = config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size
    embedding = getattr(config, "embedding_size", hidden)
    into, out_of = (getattr(config, f"{end}_embedding_size", embedding) for end in ("input", "output"))
    # ALBERT and RemBERT project their embeddings even if the width stays the same.
    projects = into != hidden or config.model_type in ("albert", "rembert")
    # An ALBERT group may run several layers.
    num_layers *= getattr(config, "inner_group_num", 1)
    return Multiplications(
        per_token=num_layers * (4 * hidden**2 + 2 * hidden * inner) + projects * into * hidden,
        per_pair=num_layers * 2 * hidden,
        per_prediction=hidden * out_of + out_of * config.vocab_size,
    )


def _deberta_v2(config: PretrainedConfig, length: float) -> Multiplications:
    """Count the multiplications of DeBERTa-v2 (He et al. 2020).

    The attention also multiplies with the table of relative positions.
    """
    plain = _bert(config, length)
    if not config.relative_attention:
        return plain
    max_positions = config.max_relative_positions
    if max_positions < 1:
        max_positions = config.max_position_embeddings
    buckets = getattr(config, "position_buckets", -1)
    table = 2 * (buckets if buckets > 0 else max_positions)
    num_ways = sum(way in (config.pos_att_type or []) for way in ("c2p", "p2c"))
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    return Multiplications(
        per_token=plain.per_token + num_layers * num_ways * table * hidden,
        per_pair=plain.per_pair,
        per_prediction=plain.per_prediction,
        per_pass=num_layers * num_ways * table * hidden**2,
    )


def _modernbert(config: PretrainedConfig, length: float) -> Multiplications:
    """Count the multiplications of ModernBERT (Warner et al. 2024).

    Local layers compute attention only between tokens within the window.
    """
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    num_global = -(-num_layers // config.global_attn_every_n_layers)
    window = min(length, config.local_attention + 1)
    layer = 4 * hidden**2 + 3 * hidden * config.intermediate_size
    return Multiplications(
        per_token=num_layers * layer + (num_layers - num_global) * 2 * hidden * window,
        per_pair=num_global * 2 * hidden,
        per_prediction=hidden * (hidden + config.vocab_size),
    )


# {`Architecture.flops`: formula}.
FORMULAS: dict[str, Callable[[PretrainedConfig, float], Multiplications]] = {
    "bert": _bert,
    "deberta-v2": _deberta_v2,
    "modernbert": _modernbert,
}


@dataclass(frozen=True)
class Computation:
    """How a step is computed.

    Attributes:
        jit_compile: TensorFlow compiles the step with `jit_compile`; on a TPU, the step is always compiled.
        tpu_layers: layers compute with `train.layers.tpu_layers`; None if a check on the first rows is yet to decide.
        shard_optimizer: moments and updates are divided among the replicas; None has the same meaning as for
            `tpu_layers`.
        reference_layers: the network is transformers' TensorFlow class instead of ours.
        num_streams: the number of parallel streams that divide the rows of each micro-batch; see `count_streams`.
    """

    jit_compile: bool
    tpu_layers: bool | None
    shard_optimizer: bool | None = False
    reference_layers: bool = False
    num_streams: int = 1


def choose_computation(
    config: RunSettings,
    model_config: PretrainedConfig,
    plan: Plan,
    recorded: Computation | None = None,
    num_streams: int = 1,
) -> Computation:
    """Choose how the steps of a plan are computed.

    Args:
        config: the settings.
        model_config: configuration of the network.
        plan: the plan of the phase.
        recorded: how the run was computed so far on this hardware. It decides all choices that the flags leave open.
        num_streams: the number of streams of a step that is not compiled by XLA.
    """
    from train.runtime.strategy import compiles_with_xla  # imports TensorFlow, which bad input should not wait for

    jit_compile = compiles_with_xla(config.hardware)
    if jit_compile is None:
        jit_compile = recorded is not None and recorded.jit_compile
    return Computation(
        jit_compile,
        _tpu_layers(config, model_config, jit_compile, recorded),
        _shard_optimizer(config, plan, recorded),
        config.hardware.reference_layers,
        1 if jit_compile else num_streams,
    )


def may_use_streams(hardware: HardwareConfig) -> bool:
    """Return whether this machine, if it has only a CPU, computes steps with TensorFlow and without XLA.

    False if the user has set the number of TensorFlow's threads.
    """
    needs_xla = hardware.jit_compile or hardware.tpu_layers == "on"
    needs_xla = needs_xla or (hardware.bfloat16 and not multiplies_in_bfloat16())
    is_ours = hardware.runtime == "tensorflow" and not hardware.wants_tpu and CLUSTER_VARIABLE not in os.environ
    return is_ours and not needs_xla and not os.environ.keys() & THREAD_VARIABLES


def count_streams(model_config: PretrainedConfig, plan: Plan, model_class: str, num_cores: int) -> int:
    """Count the parallel streams in which a CPU computes a step without XLA; 1 if a step is not divided.

    Without streams, all cores compute one operation after another together. The operations of a small model are so
    short that the cores wait for each other. With streams, each core computes its part of the rows by itself. The
    quick start's model then takes 0.89 of the time for a step on two cores, and roberta-small 1.02 of the time.
    """
    parameters = count_parameters(model_config, model_class)
    if parameters is None or parameters.total > MAX_STREAM_PARAMETERS:
        return 1
    num_rows = plan.global_batch_rows // (plan.num_replicas * plan.num_micro_batches)
    num_tokens = num_rows * (plan.mean_length or plan.max_length)
    return num_cores if num_rows >= num_cores and num_tokens >= num_cores * MIN_STREAM_TOKENS else 1


def _tpu_layers(
    config: RunSettings, model_config: PretrainedConfig, jit_compile: bool, recorded: Computation | None
) -> bool | None:
    hardware = config.hardware
    is_compiled = hardware.wants_tpu or jit_compile
    is_ours = architecture_of(model_config).is_ours and not hardware.reference_layers
    if hardware.tpu_layers != "auto" or not is_compiled or not is_ours:
        return hardware.tpu_layers == "on"
    if recorded is not None and recorded.tpu_layers is not None:
        return recorded.tpu_layers
    return None if hardware.wants_tpu else False


def _shard_optimizer(config: RunSettings, plan: Plan, recorded: Computation | None) -> bool | None:
    if not config.hardware.shard_optimizer or plan.num_replicas == 1:
        return False
    was_proven = recorded is not None and recorded.shard_optimizer is True
    return True if was_proven or not config.hardware.wants_tpu else None


def describe_computation(computation: Mapping[str, Any], *, on_tpu: bool) -> str:
    """Describe a recorded `Computation` in words."""
    layers = "TPU-optimized layers" if computation["tpu_layers"] else "reference layers"
    if computation.get("reference_layers"):
        layers = "transformers' TensorFlow classes"
    sharded = ", sharded optimizer" if computation.get("shard_optimizer") else ""
    divided = f", {num_streams} parallel streams" if (num_streams := computation.get("num_streams", 1)) > 1 else ""
    return (
        f"{'compiled with XLA' if on_tpu or computation['jit_compile'] else 'without XLA'}, {layers}{sharded}{divided}"
    )
