"""The masked language modeling task (Devlin et al. 2018). Only methods that compute with tensors import TensorFlow."""

import math
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from mlm_common.tokenizer import special_ids
from train.config.learning import EVALUATION_MLM_PROBABILITY, MaskingConfig
from train.config.settings import MASK
from train.data.inputs import Feature
from train.data.shards import TrainingInputs
from train.tasks.masking_rule import MaskingRule, masking_rule
from train.tasks.task import CardFigure, Mean, PretrainingTask, TaskCard, shown_loss, source_losses

if TYPE_CHECKING:
    import tensorflow as tf

    from train.tasks.masking import MaskedRows

# Maximum number of a mixture's sources in a one-line summary.
MAX_SOURCES = 6
USAGE = """```python
from transformers import pipeline

fill_mask = pipeline("fill-mask", model={model}{revision})
for prediction in fill_mask({sentence}):
    print(round(prediction["score"], 3), prediction["sequence"])
```"""
MASKING = (
    "{masking[masking]}, {masking[mlm_probability]:.0%} of the tokens: {masking[mask_token_rate]:.0%} masked, "
    "{masking[random_token_rate]:.0%} random, the rest kept"
)
EVALUATION = (
    "Over {num_masked_tokens:,} masked tokens of rows that were not trained on, 15% of each row, always the same."
)
LIMITS = """It predicts single masked tokens, in texts of at most {max_length} tokens. For other uses it
  must be trained further."""


class MaskedLanguageModeling(PretrainingTask):
    """Predicts masked tokens.

    Evaluation always masks like BERT, whatever the masking in training, so that the losses of runs are comparable.

    Attributes:
        rule: masking in training.
        evaluation_rule: masking in evaluation.
        pad_token_id: id of padding.
        baselines: {source of a mixture: loss of guessing from token frequencies alone, in nats}, if known.
    """

    model_class = "TFAutoModelForMaskedLM"
    means: tuple[Mean, ...] = (Mean("loss", "loss", "num_masked"), Mean("masked_accuracy", "num_correct", "num_masked"))
    card = TaskCard(
        model_kind="masked language model",
        task_name="Masked language modeling",
        pipeline_tag="fill-mask",
        figures=(
            CardFigure("loss", "loss (nats)", "loss", "Loss (nats per masked token)"),
            CardFigure("perplexity", "perplexity", "perplexity", "Perplexity of masked tokens", num_decimals=2),
            CardFigure("masked_accuracy", "accuracy", "accuracy", "Accuracy at masked tokens"),
        ),
        loss_unit="nats per masked token",
        predicts_tokens=True,
        tags=("fill-mask", "masked-lm"),
        usage=USAGE,
        procedure={"masking": MASKING},
        evaluation=EVALUATION,
        limits=LIMITS,
    )

    def __init__(self, rule: MaskingRule, pad_token_id: int):
        self.rule = rule
        self.evaluation_rule = MaskingRule(
            rule.mask_token_id, rule.special_ids, rule.vocabulary_size, EVALUATION_MLM_PROBABILITY
        )
        self.pad_token_id = pad_token_id
        self.baselines: Mapping[str, float] = {}

    @classmethod
    def of(cls, inputs: TrainingInputs, masking: MaskingConfig) -> "MaskedLanguageModeling":
        task = cls(masking_rule(inputs, masking), special_ids(inputs.tokenizer)["pad"])
        task.baselines = inputs.source_entropies_nats
        return task

    def features(self, length: int) -> dict[str, Feature]:
        """Return the feature with the token ids. Rows of padding contain no token that could be masked."""
        return {"input_ids": Feature((length,), padding=self.pad_token_id)}

    def prepare_batch(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> "MaskedRows":
        from train.tasks.masking import mask_rows

        return mask_rows(batch["input_ids"], row_keys, self.rule)

    def prepare_row(self, row: dict[str, "tf.Tensor"]) -> "MaskedRows":
        from train.tasks.masking import mask_row_by_content

        return mask_row_by_content(row["input_ids"], self.evaluation_rule)

    def sums(self, network: Any, rows: "MaskedRows", *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `num_correct` and `num_masked` over the masked tokens; see `masked_lm_loss`."""
        return self.outputs_and_sums(network, rows, {}, training=training)[-1]

    def outputs_and_sums(
        self, network: Any, rows: "MaskedRows", inputs: dict[str, "tf.Tensor"], *, training: bool
    ) -> tuple[Any, "tf.Tensor", dict[str, "tf.Tensor"]]:
        """Run the network on masked rows.

        Args:
            network: the network.
            rows: the masked rows.
            inputs: additional inputs of the network.
            training: whether this is a training step.

        Returns:
            The network's outputs at the masked tokens; the encoder's last hidden states of all tokens, (batch, length,
            hidden); and the sums of `masked_lm_loss`.
        """
        import tensorflow as tf

        from train.layers.cpu_functions import runs_unfused
        from train.tasks.heads import masked_lm_loss, predict_at
        from train.tasks.masking import collect_predictions, num_needed_slots

        rule = self.rule if training else self.evaluation_rule
        num_slots: int | tf.Tensor = rule.num_prediction_slots(rows.input_ids.shape.num_elements())
        if runs_unfused():
            num_slots = num_needed_slots(rows.is_masked, num_slots)
        predictions = collect_predictions(rows, num_slots)
        attended = tf.cast(rows.input_ids != self.pad_token_id, tf.int32)  # (batch, length)
        inputs = {"input_ids": rows.input_ids, "attention_mask": attended, **inputs}
        outputs, states = predict_at(network, inputs, predictions.positions, training=training)
        # Shapes: (1, num_predictions, vocabulary), and (1, num_predictions) twice. Without XLA the first axis is kept,
        # because in bfloat16 the gradient of a squeeze would be rounded before it is summed.
        logits, labels, weights = outputs[0], predictions.labels[tf.newaxis], predictions.weights[tf.newaxis]
        if not runs_unfused():
            logits, labels, weights = (tf.squeeze(tensor, axis=0) for tensor in (logits, labels, weights))
        return outputs, states, masked_lm_loss(logits, labels, weights, vocabulary_size=rule.vocabulary_size)

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return loss (nats), masked accuracy, perplexity, and the number of masked tokens."""
        return super().figures(sums) | {"num_masked_tokens": int(sums["num_masked"])}

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity, exp(loss); infinite if exp(loss) does not fit into a float."""
        loss = means["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def summarize(self, figures: Mapping[str, float]) -> str:
        sources = [
            f"  {name} {self._beside_baseline(name, loss, shown_loss(loss))}"
            for name, loss in source_losses(figures).items()
        ]
        remainder = f"  and {len(sources) - MAX_SOURCES} more sources" if len(sources) > MAX_SOURCES else ""
        summary = f"{super().summarize(figures)}  accuracy {100 * figures['masked_accuracy']:.1f}%"
        return summary + "".join(sources[:MAX_SOURCES]) + remainder

    def next_command(self, model: str) -> str:
        return f'python train/fill_mask.py --model {shlex.quote(model)} --text "… {MASK} …"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        loss, accuracy = figures["loss"], figures["masked_accuracy"]
        return {
            "validation loss": f"{loss:.4f} nats per masked token, perplexity {figures['perplexity']:.1f}",
            "masked accuracy": f"{accuracy:.4f} of {figures['num_masked_tokens']:,} masked tokens",
            **{
                f"loss of {name}": self._beside_baseline(name, loss, f"{loss:.4f}")
                for name, loss in source_losses(figures).items()
            },
        }

    def _beside_baseline(self, source: str, loss: float, shown: str) -> str:
        gain = self.baselines.get(source, math.nan) - loss
        if math.isnan(gain):
            return shown
        return f"{shown} ({abs(gain):.2f} {'below' if gain > 0 else 'above'} its baseline)"

    def describe_row(self, rows: "MaskedRows", tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
        original, seen, is_masked = (
            tensor[0].numpy() for tensor in (rows.original_ids, rows.input_ids, rows.is_masked)
        )
        tokens = (tokenizer.convert_ids_to_tokens(ids[is_masked].tolist()) for ids in (original, seen))
        mask, num_tokens = tokenizer.mask_token, int((original != self.pad_token_id).sum())
        predicted = [
            token if shown == mask else f"{token} ({'kept' if shown == token else f'seen as {shown}'})"
            for token, shown in zip(*tokens, strict=True)
        ]
        return {
            "first row": tokenizer.decode(original),
            "as masked": tokenizer.decode(seen),
            "predicted": f"{len(predicted)} of {num_tokens} tokens: {' '.join(predicted)}",
        }

    def num_predictions(self, num_tokens: int) -> int:
        return self.rule.num_prediction_slots(num_tokens)
