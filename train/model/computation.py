"""What a model costs by arithmetic: parameters, and operations of a step; and how the step is computed.

None of it needs TensorFlow, so a plan can show it.

Operations are counted for the fraction of the chip's peak that is used (MFU), as Chowdhery et al. 2022 (PaLM, appendix
B) do: matrix products, an addition and a multiplication each, forward once and backward twice; other work of the
hardware (recomputed activations, softmax, layer norms, the optimizer) is not. Products of attention are counted whole,
since nothing here is causal. The head works on the prediction slots only; heads of fine-tuning, which have a few
outputs, are not counted.

How a step is computed is decided once, recorded, and kept on resuming.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from train.config.settings import RunSettings
from train.model.architectures import architecture_of
from train.runtime.machines import chip_of, local_accelerator_type
from train.runtime.plan import Plan

ROBERTA = frozenset({"camembert", "roberta", "roberta-prelayernorm", "xlm-roberta"})
# Their TF classes differ in few tables and heads. Of other architectures the network is built to count.
BERT_AND_ITS_KIN = ROBERTA | {"albert", "bert", "distilbert", "electra"}
# Heads that begin with a matrix, and the architectures whose encoder has it, as a pooler.
HEADS_WITH_A_MATRIX = {
    "SequenceClassification": frozenset({"albert", "bert"}),
    "MultipleChoice": ROBERTA | {"albert", "bert"},
}


def count_parameters(config: PretrainedConfig, model_class: str = "TFAutoModelForMaskedLM") -> int | None:
    """Count the parameters as Keras does, those that several layers share once; None where the network must be built.

    The padding of the vocabulary counts. `model_class` is the auto class of transformers.
    """
    head = model_class.removeprefix("TFAutoModel").removeprefix("For")
    if config.model_type == "modernbert":
        return _modernbert_parameters(config, head)
    return _bert_parameters(config, head) if config.model_type in BERT_AND_ITS_KIN else None


def _bert_parameters(config: PretrainedConfig, head: str) -> int | None:
    kind, hidden = config.model_type, config.hidden_size
    inner = config.hidden_dim if kind == "distilbert" else config.intermediate_size
    width = getattr(config, "embedding_size", hidden)
    num_types = 0 if kind == "distilbert" else config.type_vocab_size
    num_layers = config.num_hidden_layers
    if kind == "albert":
        num_layers = config.num_hidden_groups * config.inner_group_num  # each is used several times
    layer = 4 * _dense(hidden, hidden) + _dense(hidden, inner) + _dense(inner, hidden) + 2 * _norm(hidden)
    num_parameters = (config.vocab_size + config.max_position_embeddings + num_types) * width + _norm(width)
    num_parameters += num_layers * layer
    if width != hidden or kind == "albert":  # which projects its embeddings even to the same width
        num_parameters += _dense(width, hidden)
    if kind == "roberta-prelayernorm":
        num_parameters += _norm(hidden)
    masked_lm = _dense(hidden, width) + _norm(width) + config.vocab_size * (2 if kind == "albert" else 1)
    of_row = _dense(hidden, hidden)  # the pooler, or the first layer of a classifier
    heads = {
        "": 0 if kind in ("distilbert", "electra") else of_row,
        "MaskedLM": masked_lm,
        "SequenceClassification": of_row + _dense(hidden, config.num_labels),
        "MultipleChoice": of_row + _dense(hidden, 1),
        "TokenClassification": _dense(hidden, config.num_labels),
        "QuestionAnswering": _dense(hidden, config.num_labels),
    }
    if kind in ("albert", "bert"):
        heads["PreTraining"] = of_row + masked_lm + _dense(hidden, 2 if kind == "bert" else config.num_labels)
    return num_parameters + heads[head] if head in heads else None


def _modernbert_parameters(config: PretrainedConfig, head: str) -> int | None:
    hidden, inner, norm = config.hidden_size, config.intermediate_size, _norm(config.hidden_size, config.norm_bias)
    attention = _dense(hidden, 3 * hidden, config.attention_bias) + _dense(hidden, hidden, config.attention_bias)
    feed_forward = _dense(hidden, 2 * inner, config.mlp_bias) + _dense(inner, hidden, config.mlp_bias)
    # The first layer has one norm less, and there is one before the layers and one after them.
    num_parameters = config.vocab_size * hidden + norm
    num_parameters += config.num_hidden_layers * (attention + feed_forward + 2 * norm)
    first = _dense(hidden, hidden, config.classifier_bias) + norm
    classifier = first + _dense(hidden, config.num_labels)
    heads = {
        "": 0,
        "MaskedLM": first + config.vocab_size * config.decoder_bias,
        "SequenceClassification": classifier,
        "MultipleChoice": first + _dense(hidden, 1),
        "TokenClassification": classifier,
        "QuestionAnswering": classifier,
    }
    return num_parameters + heads[head] if head in heads else None


def count_weights_in_matrices(config: PretrainedConfig, model_class: str = "TFAutoModelForMaskedLM") -> int | None:
    """Count the weights in what `train.model.build.hidden_matrices` counts; None where the network must be built."""
    kind, hidden = config.model_type, config.hidden_size
    head = model_class.removeprefix("TFAutoModel").removeprefix("For")
    if count_parameters(config, model_class) is None:
        return None
    num_layers = config.num_hidden_layers
    if kind == "modernbert":
        has_dense = bool(head)
        return num_layers * (4 * hidden**2 + 3 * hidden * config.intermediate_size) + has_dense * hidden**2
    if kind == "albert":
        num_layers = config.num_hidden_groups * config.inner_group_num
    inner = config.hidden_dim if kind == "distilbert" else config.intermediate_size
    of_head = 0
    if head in ("MaskedLM", "PreTraining"):
        of_head = hidden * getattr(config, "embedding_size", hidden)
    elif head in HEADS_WITH_A_MATRIX and kind not in HEADS_WITH_A_MATRIX[head]:
        of_head = hidden**2
    return num_layers * (4 * hidden**2 + 2 * hidden * inner) + of_head


def _dense(num_inputs: int, num_outputs: int, has_bias: bool = True) -> int:
    return (num_inputs + has_bias) * num_outputs


def _norm(width: int, has_bias: bool = True) -> int:
    return width * (1 + has_bias)


@dataclass(frozen=True)
class Multiplications:
    """Multiplications of the forward pass.

    per_token: of the weights that every token goes through.
    per_pair: of attention, for each pair of tokens in a row.
    per_prediction: of the head, for each prediction slot.
    per_pass: of what a pass does once, whatever its rows (relative positions).
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
    """Count the floating-point operations of one step; None for an architecture whose count is not known.

    Args:
        num_rows: rows of the step, over all micro-batches.
        length: tokens a row, padding included; on average where rows differ in length.
        num_predictions: prediction slots of the step, over all micro-batches.
        num_micro_batches: forward passes that the rows are split into.
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
    """Count the floating-point operations of a step of the plan; None for a model whose operations cannot be counted.

    Args:
        num_predictions: prediction slots of a micro-batch; 0 where the head is not a masked LM's.
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
    """Compute the seconds that a step would take if all replicas computed at their peak.

    None without a TPU, on a TPU that is not this machine's or not in `train.runtime.machines`, and for a model whose
    operations cannot be counted. Further arguments are those of `planned_step_flops`.
    """
    if not config.hardware.wants_tpu or config.hardware.tpu_name != "local":
        return None
    chip = chip_of(local_accelerator_type())
    flops = planned_step_flops(model_config, plan, num_predictions)
    if chip is None or flops is None:
        return None
    return flops / (plan.num_replicas * chip.peak_flops_per_second)


def _bert(config: PretrainedConfig, length: float) -> Multiplications:  # noqa: ARG001
    """BERT, RoBERTa and theirs; with embeddings of another width also ALBERT, ELECTRA, RemBERT and RoFormer."""
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    inner = config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size
    embedding = getattr(config, "embedding_size", hidden)
    into, out_of = (getattr(config, f"{end}_embedding_size", embedding) for end in ("input", "output"))
    # These project their embeddings even to the same width.
    projects = into != hidden or config.model_type in ("albert", "rembert")
    # An ALBERT group may run several layers.
    num_layers *= getattr(config, "inner_group_num", 1)
    return Multiplications(
        per_token=num_layers * (4 * hidden**2 + 2 * hidden * inner) + projects * into * hidden,
        per_pair=num_layers * 2 * hidden,
        per_prediction=hidden * out_of + out_of * config.vocab_size,
    )


def _deberta_v2(config: PretrainedConfig, length: float) -> Multiplications:
    """Disentangled attention (He et al. 2020): each token also meets the table of relative positions, either way."""
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


def _mobilebert(config: PretrainedConfig, length: float) -> Multiplications:  # noqa: ARG001
    """MobileBERT (Sun et al. 2020) with its bottlenecks and stacked feed-forward networks."""
    hidden, inner, num_layers = config.hidden_size, config.true_hidden_size, config.num_hidden_layers
    value_width, num_bottlenecks = hidden, 0
    if config.use_bottleneck:
        num_bottlenecks = 2  # into the layer and out of it
        if config.use_bottleneck_attention:
            value_width = inner
        elif config.key_query_shared_bottleneck:
            num_bottlenecks = 3
    layer = (
        (3 * inner + value_width) * inner
        + num_bottlenecks * hidden * inner
        + config.num_feedforward_networks * 2 * inner * config.intermediate_size
    )
    return Multiplications(
        per_token=num_layers * layer + config.embedding_size * (3 if config.trigram_input else 1) * hidden,
        per_pair=num_layers * 2 * inner,
        per_prediction=hidden * (hidden + config.vocab_size),
    )


def _modernbert(config: PretrainedConfig, length: float) -> Multiplications:
    """ModernBERT (Warner et al. 2024); of a local layer the pairs of tokens within its window are counted."""
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    num_global = -(-num_layers // config.global_attn_every_n_layers)
    window = min(length, config.local_attention + 1)
    layer = 4 * hidden**2 + 3 * hidden * config.intermediate_size
    return Multiplications(
        per_token=num_layers * layer + (num_layers - num_global) * 2 * hidden * window,
        per_pair=num_global * 2 * hidden,
        per_prediction=hidden * (hidden + config.vocab_size),
    )


# By the keys that `train.model.architectures` names.
FORMULAS: dict[str, Callable[[PretrainedConfig, float], Multiplications]] = {
    "bert": _bert,
    "deberta-v2": _deberta_v2,
    "mobilebert": _mobilebert,
    "modernbert": _modernbert,
}


@dataclass(frozen=True)
class Computation:
    """How a step is computed.

    jit_compile: it is wrapped in `jit_compile`; a TPU compiles by itself.
    tpu_layers: its layers are those of `train.layers.tpu_layers`; None where the first rows decide.
    shard_optimizer: moments and updates are divided among the replicas; None where the first rows decide.
    reference_layers: its network is made of transformers' TensorFlow classes instead of ours.
    """

    jit_compile: bool
    tpu_layers: bool | None
    shard_optimizer: bool | None = False
    reference_layers: bool = False


def choose_computation(
    config: RunSettings,
    model_config: PretrainedConfig,
    plan: Plan,
    recorded: Computation | None = None,
) -> Computation:
    """Choose how the steps of a plan are computed.

    `recorded`, how the run was computed so far on this hardware, holds where flags leave it open.
    """
    from train.runtime.strategy import compiles_with_xla  # TensorFlow, not for bad input

    jit_compile = compiles_with_xla(config.hardware)
    if jit_compile is None:
        jit_compile = recorded is not None and recorded.jit_compile
    return Computation(
        jit_compile,
        _tpu_layers(config, model_config, jit_compile, recorded),
        _shard_optimizer(config, plan, recorded),
        config.hardware.reference_layers,
    )


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
    """Describe how a step is computed, from a `Computation` as it is recorded."""
    layers = "TPU-optimized layers" if computation["tpu_layers"] else "reference layers"
    if computation.get("reference_layers"):
        layers = "transformers' TensorFlow classes"
    sharded = ", sharded optimizer" if computation.get("shard_optimizer") else ""
    return f"{'compiled with XLA' if on_tpu or computation['jit_compile'] else 'without XLA'}, {layers}{sharded}"
