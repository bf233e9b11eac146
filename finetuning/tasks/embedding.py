"""Embeddings of texts: the task, its loss and scores, and the export for sentence-transformers."""

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.embedding import EmbeddingConfig, EmbeddingOptimization
from finetuning.data.inputs import ATTENTION_MASK, INDEX, INPUT_IDS
from finetuning.data.texts import PASSAGE, TextInputs
from finetuning.loop.model import open_start
from finetuning.loop.task import EVAL_NAME, ExampleTask, Split, finetuned_card, format_score
from finetuning.loop.training import FinetuningJob, Predict
from finetuning.tasks.metrics import check_packages, chosen_metric
from finetuning.tasks.pairs import SCORE, TEXT, encode_pairs, read_splits
from finetuning.tasks.retrieval import METRICS, OTHERS, SCORED_METRICS
from mlm_common.cli.settings import require
from train.data.inputs import Feature
from train.loop.run import Run, new_network
from train.model.architectures import ARCHITECTURES, OWN_HEAD
from train.runtime.machines import Cluster
from train.tasks.task import Mean

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

    from train.loop.trainer import Trainer
    from train.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

VECTOR = "vector"
FILES = {"validation": EVAL_NAME, "test": "predict_results_test"}
DENSE = "dense"
USAGE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({model}{revision})
queries = model.encode_query(["A question."])
passages = model.encode_document(["A text that may answer it.", "Another text."])
print(model.similarity(queries, passages))
```"""
ON_PASSAGES = (
    "{num_queries:,} validation queries, each among {num_passages:,} passages. They also decided which checkpoint was "
    "kept."
)
ON_SCORES = (
    "The cosines of {num_queries:,} validation texts with {num_passages:,} others, compared with the scores of the "
    "pairs. They also decided which checkpoint was kept."
)
LIMITS = """Vectors are compared by their cosine. It takes texts of at most {max_length} tokens; longer ones are cut."""


@dataclass(frozen=True)
class Encoder:
    """How texts become vectors.

    Attributes:
        pooling: "mean" or "cls".
        width: width of the model's hidden states.
        embedding_dim: width of the vectors; None for `width`, without a dense layer.
        prompts: texts that are prepended to queries and to passages.
        max_length: maximum number of tokens per text.
    """

    pooling: str
    width: int
    embedding_dim: int | None
    prompts: tuple[str, str]
    max_length: int

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.embedding_dim or self.width

    def files(self) -> dict[str, str]:
        """Return the files with which sentence-transformers computes the same vectors, {name: content}."""
        modules = ["Transformer", "Pooling", *(["Dense"] if self.embedding_dim else []), "Normalize"]
        kind = "sentence_transformers.models."
        pooling = {f"pooling_mode_{mode}": mode.startswith(self.pooling) for mode in ("cls_token", "mean_tokens")}
        contents: dict[str, Any] = {
            "modules.json": [
                {"idx": index, "name": str(index), "path": f"{index}_{module}" if index else "", "type": kind + module}
                for index, module in enumerate(modules)
            ],
            "sentence_bert_config.json": {"max_seq_length": self.max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": dict(zip(("query", "document"), self.prompts, strict=True)),
                "similarity_fn_name": "cosine",
            },
            "1_Pooling/config.json": {"word_embedding_dimension": self.width, **pooling},
        }
        if self.embedding_dim:
            sizes = {"in_features": self.width, "out_features": self.embedding_dim, "bias": True}
            contents["2_Dense/config.json"] = sizes | {"activation_function": "torch.nn.modules.linear.Identity"}
        return {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}

    def weight_files(self) -> dict[str, dict[str, str]]:
        """Return the weights in the dense layer's file, {file: {name in the file: name in the model}}."""
        weights = {f"linear.{name}": f"{OWN_HEAD}.{DENSE}.{name}" for name in ("weight", "bias")}
        return {"2_Dense/model.safetensors": weights} if self.embedding_dim else {}


class Embedding(ExampleTask):
    """Learns vectors of texts.

    Either a query and its passage get close vectors, or the cosine of two texts becomes their score.

    In training, a row is a query with its passages. In an evaluation, a row is one text.

    Args:
        encoder: description of how texts become vectors.
        num_passages: number of passages per training row.
        settings: settings of the loss.
        has_scores: whether to learn scores as cosines, instead of contrasting passages.
        metrics: names of the metrics of an evaluation.
        metric: the metric by which checkpoints are compared; by default the first metric.
        task_arguments: arguments of `ExampleTask`.
    """

    model_class = "TFAutoModel"

    def __init__(
        self,
        encoder: Encoder,
        num_passages: int,
        settings: EmbeddingOptimization,
        *,
        has_scores: bool = False,
        metrics: tuple[str, ...] = METRICS,
        metric: str | None = None,
        **task_arguments: Any,
    ):
        super().__init__(**task_arguments)
        self.encoder, self.num_passages, self.settings = encoder, num_passages, settings
        self.has_scores, self.metrics, self.metric = has_scores, metrics, chosen_metric(metrics, metric)
        self.couples_rows, self.adds_weights = not has_scores, encoder.embedding_dim is not None
        self.dims = [*(dim for dim in settings.matryoshka_dims if dim != encoder.dim), encoder.dim]
        self.means: tuple[Mean, ...] = (Mean("loss", "loss", "num_rows"),)
        if not has_scores:
            self.means = (*self.means, Mean("batch_accuracy", "num_right", "num_rows"))
        self.card = finetuned_card(
            "model for embeddings of texts",
            "Sentence similarity" if metrics == SCORED_METRICS else "Retrieval",
            "sentence-similarity",
            {name: name for name in metrics},
            tags=("sentence-transformers", "sentence-similarity", "feature-extraction"),
            usage=USAGE,
            evaluation=ON_SCORES if metrics == SCORED_METRICS else ON_PASSAGES,
            limits=LIMITS,
            library="sentence-transformers",
            files=encoder.files(),
            weight_files=encoder.weight_files(),
        )

    def features(self, length: int) -> dict[str, Feature]:
        query_features = self.text_features(length) | {TEXT: Feature(padding=-1)}
        passage_features = {
            f"{PASSAGE}{name}": Feature((self.num_passages, *feature.shape), padding=feature.padding)
            for name, feature in self.text_features(length).items()
        }
        return query_features | ({SCORE: Feature(dtype="float32")} if self.has_scores else {}) | passage_features

    def adapt_network(self, network: Any) -> Any:
        if self.encoder.embedding_dim is None:
            return network
        import tf_keras

        from train.tasks.heads import put_head

        layer = tf_keras.layers.Dense(self.encoder.embedding_dim, name=DENSE, dtype="float32")
        return put_head(network, lambda: [layer], lambda rows: self.vectors(network, rows, training=False))

    def vectors(self, network: Any, texts: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the vector of each text, float32 (texts, width), not scaled to length 1."""
        import tensorflow as tf

        from train.tasks.heads import mean_state

        states = network(self.network_inputs(texts), training=training).last_hidden_state
        is_mean = self.encoder.pooling == "mean"
        pooled = mean_state(states, texts[ATTENTION_MASK]) if is_mean else tf.cast(states[:, 0], tf.float32)
        return network.custom_head(pooled, training=training) if self.encoder.embedding_dim else pooled

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the vectors of all texts of each row, float32 (rows, 1 + passages, width).

        If queries are padded to the same length as passages, all texts go through the network in one call.
        """
        import tensorflow as tf

        from train.layers.random_bits import dropping_out_texts

        queries = {name: ids[:, tf.newaxis] for name, ids in self.network_inputs(rows).items()}  # (rows, 1, length)
        passages = {name: rows[f"{PASSAGE}{name}"] for name in queries}  # (rows, passages, length)
        if queries[INPUT_IDS].shape[2] == passages[INPUT_IDS].shape[2]:
            groups = [(0, {name: tf.concat([queries[name], passages[name]], axis=1) for name in queries})]
        else:
            groups = [(0, queries), (1, passages)]
        group_vectors = []
        for first, texts in groups:
            num_rows, num_texts = texts[INPUT_IDS].shape[:2]
            flat = {name: tf.reshape(values, (-1, values.shape[2])) for name, values in texts.items()}
            with dropping_out_texts(range(first, first + num_texts)):
                vectors = self.vectors(network, flat, training=training)
            group_vectors.append(tf.reshape(vectors, (num_rows, num_texts, -1)))
        return tf.concat(group_vectors, axis=1)

    def sums_of_outputs(self, outputs: "tf.Tensor", rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `num_rows` and, without scores, `num_right` (rows whose closest passage is the positive)."""
        import tensorflow as tf

        from finetuning.tasks.contrast import contrastive_losses, cosine_losses

        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)  # (rows,)
        if self.has_scores:
            row_values = {"loss": cosine_losses(outputs, rows[SCORE], self.dims)}
        else:
            texts = tf.concat([rows[TEXT][:, tf.newaxis], rows[f"{PASSAGE}{INDEX}"]], axis=1)
            losses, is_right = contrastive_losses(
                outputs,
                texts,
                temperature=self.settings.temperature,
                dims=self.dims,
                is_symmetric=self.settings.symmetric_loss,
            )
            row_values = {"loss": losses, "num_right": is_right}
        sums = {name: tf.reduce_sum(values * is_row) for name, values in row_values.items()}
        return sums | {"num_rows": tf.reduce_sum(is_row)}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        import tensorflow as tf

        if training:
            return self.sums_of_outputs(self.outputs(network, rows, training=True), rows)
        num_rows = tf.reduce_sum(tf.cast(rows[INDEX] >= 0, tf.float32))
        return {"num_rows": num_rows, **self.prediction_outputs(network, rows)}

    def prediction_outputs(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        from finetuning.tasks.contrast import unit

        return {VECTOR: unit(self.vectors(network, rows, training=False)), INDEX: rows[INDEX]}

    def predictions(self, sums: Mapping[str, Any], split: Split) -> NDArray[np.float32]:  # noqa: ARG002
        return self.in_order(sums, VECTOR)

    def compute_figures(self, sums: Mapping[str, Any], predictions: Any, split: Split) -> dict[str, float]:
        return self.compute_scores(sums, predictions, split)

    def compute_scores(self, sums: Mapping[str, Any], predictions: Any, split: Split) -> dict[str, float]:  # noqa: ARG002
        return split.examples.figures(predictions, self.settings.temperature)

    def format_predictions(self, predictions: Any, split: Split) -> str:
        """Format the metrics of each query, or the cosines of scored pairs, as a table."""
        judged = split.examples
        columns = {"cosine": judged.cosines(predictions)} if judged.has_scores else judged.searched(predictions)[0]
        lines = ("\t".join(f"{value:.6f}" for value in row) for row in zip(*columns.values(), strict=True))
        return "\n".join(["\t".join(columns), *lines, ""])

    def next_command(self, model: str) -> str:
        return f'python finetuning/search.py --model {shlex.quote(model)} --corpus FILE "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        rows = {"validation": f"{figures['num_queries']:,} queries, {figures['num_passages']:,} passages"}
        rows |= {name.replace("_", " "): format_score(figures[name]) for name in self.metrics}
        first = self.metrics[0]
        for other, words in OTHERS.items():
            if f"{other}_{first}" in figures:
                low, high = (figures[f"above_{other}_{first}_{end}"] for end in ("low", "high"))
                verdict = compared(low, high)
                rows[words] = f"{first.replace('_', ' ')} {format_score(figures[f'{other}_{first}'])}; {verdict}"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        passage = {name: rows[f"{PASSAGE}{name}"][:, 0] for name in (INPUT_IDS, ATTENTION_MASK)}
        return {"first row": self.first_text(rows, tokenizer), "its passage": self.first_text(passage, tokenizer)}


def compared(low: float, high: float) -> str:
    """Say whether the model is better than a baseline, given the 95% interval of the difference of their metrics."""
    if low > 0:
        return f"this model is better by {low:.4f} to {high:.4f} (95% interval)"
    if high < 0:
        return f"this model is worse by {-high:.4f} to {-low:.4f} (95% interval)"
    return f"no clear difference: {low:+.4f} to {high:+.4f} (95% interval)"


class EmbeddingJob(FinetuningJob[EmbeddingConfig]):
    """The job of `run_embedding.py`."""

    def open_run(self, config: EmbeddingConfig, cluster: Cluster) -> Run:
        """Read and encode the texts, and make the run.

        Raises:
            InputError: texts, scores, the tokenizer or the model are invalid.
        """
        check_packages("scipy", "sklearn")
        data, settings = config.data, config.optimization
        start = open_start(config)
        width = start.model_config.hidden_size
        prompts = (data.query_prompt, data.passage_prompt)
        encoder = Encoder(config.model.pooling, width, config.model.embedding_dim, prompts, data.max_seq_length)
        dims = settings.matryoshka_dims
        require(not dims or dims[-1] <= encoder.dim, f"must be at most {encoder.dim}", "--matryoshka-dims", dims)
        train, judged = read_splits(data)
        has_scores = train.labels is not None
        require(not (has_scores and settings.symmetric_loss), "needs pairs without scores", "--symmetric-loss", True)
        splits = {}
        for name, read in judged.items():
            texts = [prompts[0] + query for query in read.queries] + [prompts[1] + passage for passage in read.passages]
            splits[name] = Split(start.encode_texts((texts,), data.max_seq_length), read, f"{FILES[name]}.txt")
        validation = splits.get("validation")
        self.validation = {"": validation} if validation else {}
        self.tests = [splits["test"]] if "test" in splits else []
        task = Embedding(
            encoder,
            max(1, len(train.texts) - 1),
            settings,
            has_scores=has_scores,
            metrics=validation.examples.metrics if validation else METRICS,
            metric=data.metric_name,
            **start.task_arguments,
        )
        rows = encode_pairs(start, train)
        plan_lines = {"texts": train.name}
        if validation is not None:
            num_queries, num_passages = len(validation.examples.queries), len(validation.examples.passages)
            counts = f"{num_queries:,} queries and {num_passages:,} passages"
            plan_lines["rows"] = f"{train.num_rows:,} to train on, {counts} to evaluate on"
        run = start.run(task, rows, validation, cluster, plan_lines=plan_lines, inputs_class=TextInputs)
        if data.unsupervised:
            model_config = run.phases[0].model_config
            rates = [getattr(model_config, name) for name in ARCHITECTURES[model_config.model_type].dropouts]
            require(any(rates), "must be above 0 with --unsupervised, such as 0.1", "--dropout", 0)
        return run

    def write_results(self, trainer: "Trainer", step: int, predict: Predict) -> dict[str, float] | None:
        task, config = trainer.phase.task, trainer.run.config
        assert isinstance(task, Embedding)
        assert isinstance(config, EmbeddingConfig)
        splits = [split for split in (*self.validation.values(), *self.tests) if not split.examples.has_scores]
        if splits and config.data.baselines:
            network, runtime = trainer.model.network, trainer.runtime
            logger.info("Computing the baselines: %s", ", ".join(OTHERS.values()))
            random_weights = new_network(trainer.phase).get_weights()
            with runtime.on_host(network.variables):
                trained_weights = network.get_weights()
            set_weights(runtime, network, random_weights)
            for split in splits:
                split.examples.compare_with(task.predictions(predict(split.rows), split))
            set_weights(runtime, network, trained_weights)
        figures = super().write_results(trainer, step, predict)
        first = task.metrics[0]
        if figures is not None and f"random_{first}" in figures and figures[f"above_random_{first}_low"] <= 0:
            is_worse = figures[f"above_random_{first}_high"] < 0
            inputs = trainer.phase.inputs
            assert isinstance(inputs, TextInputs)
            logger.warning(
                "The model is %s than random weights: %s %s, with random weights %s. %s",
                "worse" if is_worse else "not clearly better",
                *(
                    first.replace("_", " "),
                    format_score(figures[first]),
                    format_score(figures[f"random_{first}"]),
                ),
                how_to_improve(config, task.encoder.width, inputs.train_rows.passages.num_rows),
            )
        return figures


def set_weights(runtime: "Runtime", network: Any, weights: Sequence[NDArray[Any]]) -> None:
    with runtime.scope(), runtime.on_host(network.variables):
        network.set_weights(weights)
        runtime.push(network.variables)


def how_to_improve(config: EmbeddingConfig, width: int, num_passages: int) -> str:
    """Return a hint for a model that is not better than random weights.

    Args:
        config: settings of the run.
        width: width of the model's hidden states.
        num_passages: number of different passages to train on.
    """
    if config.model.embedding_dim == width:
        return "If it was whitened, train for more steps, or with a higher --learning-rate such as 1e-3."
    start, texts, needed = shlex.quote(str(config.model.init_from)), "TEXTS", ""
    if config.data.train_file is not None and num_passages > width:
        texts = shlex.quote(config.data.train_file)
    else:
        needed = f" (TEXTS must have more than {width} different texts)"
    return (
        f"Whiten it first: `python recipes/whiten.py {start} {texts} work/whitened`{needed}, then train with "
        f"`--init-from work/whitened --embedding-dim {width} --learning-rate 1e-3`."
    )
