"""The objectives of BERT and ALBERT, masked tokens plus a question about each pair of segments; `task_of`."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.storage import read_file
from mlm_common.tokenizer import special_ids
from tfrecord_prep.manifest import IS_NEXT, PAIRS
from tfrecord_prep.records import LABEL_KEY, feature_names, read_records
from train.config.learning import MaskingConfig
from train.config.settings import TrainingConfig
from train.data.inputs import Feature
from train.data.shards import TrainingInputs
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.masking_rule import MaskingRule, masking_rule
from train.tasks.task import SOURCE_LOSS, CardFigure, Mean, PretrainingTask, TaskCard, identity_of, load_class

if TYPE_CHECKING:
    import tensorflow as tf

# Features in the rows of all shards.
STANDARD_FEATURES = {"input_ids", "attention_mask"}
# Label of a pair that does not count.
NO_LABEL = -100
EVALUATION = (
    "Over {num_masked_tokens:,} masked tokens of rows that were not trained on, 15% of each row, always the same, and "
    "over {num_pairs:,} pairs. The loss is the sum of both."
)


class PairPretraining(MaskedLanguageModeling):
    """Predicts masked tokens, and answers a question about each pair of segments.

    The loss is the mean over the masked tokens of the global batch plus the mean over the pairs of the global batch.
    """

    model_class = "TFAutoModelForPreTraining"
    pair_name: str  # name of the question, used in the names of metrics

    def __init__(self, rule: MaskingRule, pad_token_id: int, sep_token_id: int):
        super().__init__(rule, pad_token_id)
        self.sep_token_id = sep_token_id

    @classmethod
    def of(cls, inputs: TrainingInputs, masking: MaskingConfig) -> "PairPretraining":
        for folder, chunking in inputs.chunkings():
            if chunking != PAIRS:
                raise InputError(
                    f"--objective mlm+{cls.pair_name} needs shards made with --chunking {PAIRS}; the chunking of "
                    f"{folder} is {chunking}. Prepare the shards again with that chunking, or leave the flag out."
                )
        ids = special_ids(inputs.tokenizer)
        return cls(masking_rule(inputs, masking), ids["pad"], ids["sep"])

    def features(self, length: int) -> dict[str, Feature]:
        return {**super().features(length), LABEL_KEY: Feature(padding=NO_LABEL)}

    @abstractmethod
    def ask(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> tuple["tf.Tensor", ...]:
        """Return rows, int32 (batch, length), answers, int32 (batch,), and whether the answers count, bool (batch,)."""

    def prepare_batch(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> Any:
        import tensorflow as tf

        from train.tasks.masking import PairRows

        input_ids, labels, counts = self.ask(batch, row_keys)
        masked = super().prepare_batch({"input_ids": input_ids}, row_keys)
        return PairRows(masked, labels, tf.cast(counts, tf.float32))

    def prepare_row(self, row: dict[str, "tf.Tensor"]) -> Any:
        import tensorflow as tf

        from train.tasks.masking import PairRows, key_of_content

        batch = {name: feature[tf.newaxis] for name, feature in row.items()}
        input_ids, labels, counts = (tensor[0] for tensor in self.ask(batch, key_of_content(row["input_ids"])))
        return PairRows(super().prepare_row({"input_ids": input_ids}), labels, tf.cast(counts, tf.float32))

    def apply_global_weights(self, rows: Any, add_up: Callable[["tf.Tensor"], "tf.Tensor"]) -> Any:
        """Scale the weights of pairs, because `sums` are divided by the number of masked tokens.

        The weighted losses of all pairs in the global batch, divided by the number of masked tokens, then sum to the
        mean loss of a pair.
        """
        import tensorflow as tf

        num_masked = add_up(tf.reduce_sum(tf.cast(rows.masked.is_masked, tf.float32)))
        num_pairs = add_up(tf.reduce_sum(rows.weights))
        return rows._replace(weights=rows.weights * tf.math.divide_no_nan(num_masked, num_pairs))

    def sums(self, network: Any, rows: Any, *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up the total loss, and the losses of tokens and of pairs; see `masked_lm_loss` and `pair_losses`."""
        import tensorflow as tf

        from train.tasks.masking import pair_losses, token_types

        types = token_types(rows.masked.input_ids, self.sep_token_id, self.pad_token_id)
        outputs, _, sums = self.outputs_and_sums(network, rows.masked, {"token_type_ids": types}, training=training)
        losses, is_right = pair_losses(outputs[1], tf.maximum(rows.labels, 0))
        counts = tf.cast(rows.weights > 0, tf.float32)
        return {
            **sums,
            "loss": sums["loss"] + tf.reduce_sum(losses * rows.weights),
            "mlm_loss": sums["loss"],
            "pair_loss": tf.reduce_sum(losses * counts),
            "num_right_pairs": tf.reduce_sum(is_right * counts),
            "num_pairs": tf.reduce_sum(counts),
        }

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return the losses (nats), the accuracies, the perplexity, and the numbers of masked tokens and of pairs."""
        figures = super().figures(sums)
        loss = figures["mlm_loss"] + figures[f"{self.pair_name}_loss"]
        return figures | {"loss": loss, "num_pairs": int(sums["num_pairs"])}

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:
        return super().derived_figures({"loss": means["mlm_loss"]})  # only masked tokens have a perplexity

    def summarize(self, figures: Mapping[str, float]) -> str:
        return f"{super().summarize(figures)}  pairs {100 * figures[f'{self.pair_name}_accuracy']:.1f}%"

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        loss, accuracy = figures[f"{self.pair_name}_loss"], figures[f"{self.pair_name}_accuracy"]
        return {
            **super().describe({**figures, "loss": figures["mlm_loss"]}),
            f"{self.pair_name} loss": f"{loss:.4f} nats per pair",
            f"{self.pair_name} accuracy": f"{accuracy:.4f} of {figures['num_pairs']:,} pairs",
        }

    def describe_row(self, rows: Any, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
        counts = bool(rows.weights[0] > 0)
        asked = {self.pair_name: str(int(rows.labels[0])) if counts else "not asked"}
        return super().describe_row(rows.masked, tokenizer) | asked


def _means(pair_name: str) -> tuple[Mean, ...]:
    return (
        Mean("loss", "loss", "num_masked"),
        Mean("mlm_loss", "mlm_loss", "num_masked"),
        Mean("masked_accuracy", "num_correct", "num_masked"),
        Mean(f"{pair_name}_loss", "pair_loss", "num_pairs"),
        Mean(f"{pair_name}_accuracy", "num_right_pairs", "num_pairs"),
    )


def _card(pair_name: str, title: str, limits: str) -> TaskCard:
    card = MaskedLanguageModeling.card
    figures = {figure.name: figure for figure in card.figures}
    return replace(
        card,
        figures=(
            CardFigure("loss", "loss (nats)", "loss", "Loss (nats, of masked tokens and of pairs)"),
            CardFigure("mlm_loss", "of masked tokens", "loss", "Loss (nats per masked token)"),
            figures["perplexity"],
            figures["masked_accuracy"],
            CardFigure(f"{pair_name}_accuracy", f"accuracy, {title}", "accuracy", f"Accuracy, {title}"),
        ),
        loss_unit="nats per masked token, and per pair",
        predicts_tokens=False,  # the loss includes more than tokens
        evaluation=EVALUATION,
        limits=f"{card.limits} {limits}",
    )


class NextSentencePrediction(PairPretraining):
    """Asks whether the second segment follows the first; 1 if it is from another document (Devlin et al. 2018)."""

    pair_name = "nsp"
    means = _means("nsp")
    card = _card("nsp", "next sentence", "Its head for pairs answers 1 where the second text is a random one.")

    def ask(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> tuple["tf.Tensor", ...]:  # noqa: ARG002
        return batch["input_ids"], batch[LABEL_KEY], batch[LABEL_KEY] >= 0


class SentenceOrderPrediction(PairPretraining):
    """Asks whether the segments were swapped; 1 if they were (Lan et al. 2019, ALBERT).

    Segments from different documents have no order, so there is no question about them.
    """

    pair_name = "sop"
    means = _means("sop")
    card = _card("sop", "sentence order", "Its head for pairs answers 1 where the two texts were swapped.")

    def ask(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> tuple["tf.Tensor", ...]:
        import tensorflow as tf

        from train.tasks.masking import swap_some

        input_ids, is_swapped = swap_some(batch["input_ids"], row_keys, self.sep_token_id)
        has_order = batch[LABEL_KEY] == IS_NEXT
        input_ids = tf.where(has_order[:, tf.newaxis], input_ids, batch["input_ids"])
        return input_ids, tf.cast(is_swapped, tf.int32), has_order


# Attributes that a custom task must have.
REQUIRED_ATTRIBUTES = ("model_class", "means", "card")
# The values of `--objective`.
OBJECTIVES: dict[str, type[MaskedLanguageModeling]] = {
    "mlm": MaskedLanguageModeling,
    "mlm+nsp": NextSentencePrediction,
    "mlm+sop": SentenceOrderPrediction,
}


def task_of(config: TrainingConfig, inputs: TrainingInputs) -> PretrainingTask:
    """Return the task of a run, or of one of its phases.

    Raises:
        InputError: the task does not fit the inputs or the settings.
    """
    task = _custom_task(config, inputs) or OBJECTIVES[config.model.objective].of(inputs, config.masking)
    metric = config.data.metric_for_best.removeprefix("eval_")
    metrics = ["loss", *(f"{SOURCE_LOSS}{name}" for name in inputs.evaluated() if name)]
    require(metric in metrics, f"must be one of {', '.join(metrics)}", "--metric-for-best", config.data.metric_for_best)
    task.metric, task.errors = metric, (metric,)
    return task


def _custom_task(config: TrainingConfig, inputs: TrainingInputs) -> PretrainingTask | None:
    name, objective = config.data.task, config.model.objective
    if name is None:
        return None
    require(objective == "mlm", "cannot be combined with --task", "--objective", objective)
    task_class = load_class(name, PretrainingTask, REQUIRED_ATTRIBUTES)  # type: ignore[type-abstract]
    task = task_class.of(inputs, config.masking)
    task.identity, task.adds_weights = {"task": identity_of(name)}, True
    reserved_names = [mean.name for mean in task.means if mean.name.startswith(SOURCE_LOSS)]
    rule = f"must not have a metric named {SOURCE_LOSS}…, which is reserved for the losses of sources"
    require(not reserved_names, rule, "--task", ", ".join(reserved_names))
    masked_lm_class = MaskedLanguageModeling.model_class
    rule = f"must have the model_class {masked_lm_class} with --score-pairs or --score-words"
    require(task.model_class == masked_lm_class or not config.data.is_scored, rule, "--task", task.model_class)
    if features := task.features(inputs.max_length).keys() - STANDARD_FEATURES:
        for shards in (shards for shards in (*inputs.train_sets, *inputs.eval_sets) if shards.paths):
            missing = sorted(features - feature_names(next(read_records(read_file(shards.paths[0])))))
            rule = f"needs rows with the features {', '.join(missing)}"
            require(not missing, rule, "--task", f"{shards.folder} without them")
    return task
