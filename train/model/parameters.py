"""The number of a network's parameters, by arithmetic: a plan needs no TensorFlow for it."""

from transformers import PretrainedConfig

ROBERTA = frozenset({"camembert", "roberta", "roberta-prelayernorm", "xlm-roberta"})
# Their TF classes differ in few tables and heads. Of other architectures the network is built to count.
BERT_AND_ITS_KIN = ROBERTA | {"albert", "bert", "distilbert", "electra"}


def count_parameters(config: PretrainedConfig, model_class: str = "TFAutoModelForMaskedLM") -> int | None:
    """Count the parameters as Keras does, those that several layers share once; None where the network must be built.

    Args:
        config: of the model; with the padding of its vocabulary, which counts.
        model_class: the auto class of transformers.
    """
    head = model_class.removeprefix("TFAutoModel").removeprefix("For")
    if config.model_type == "modernbert":
        return _modernbert(config, head)
    return _bert(config, head) if config.model_type in BERT_AND_ITS_KIN else None


def _bert(config: PretrainedConfig, head: str) -> int | None:
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


def _modernbert(config: PretrainedConfig, head: str) -> int | None:
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


def _dense(num_inputs: int, num_outputs: int, has_bias: bool = True) -> int:
    return (num_inputs + has_bias) * num_outputs


def _norm(width: int, has_bias: bool = True) -> int:
    return width * (1 + has_bias)
