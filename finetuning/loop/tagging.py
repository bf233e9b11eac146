"""A run of tagging: its sentences and model opened, its results written."""

import logging
from typing import TYPE_CHECKING

from finetuning.config.settings import TaggingConfig
from finetuning.data.labels import LabelReading, Labels, find_labels
from finetuning.data.rows import EncodedRows
from finetuning.data.tagged import OUTSIDE, Sentences, encode_sentences, read_sentences
from finetuning.loop.model import open_start
from finetuning.loop.results import named, train_results, write_results
from finetuning.loop.training import Job, Predict
from finetuning.scores.tagging import baseline, check_packages, metrics_of, scores
from finetuning.tasks.tagging import Tagging
from mlm_common.storage import open_folder
from train.loop.run import Run
from train.runtime.cluster import Cluster
from train.runtime.run_folder import TAGS_NAME

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)


class TaggingJob(Job[TaggingConfig]):
    """The job of `run_tagging.py`."""

    def open_run(self, config: TaggingConfig, cluster: Cluster) -> Run:
        """Read and encode the sentences, and make task and model configuration of them.

        Raises:
            InputError: whatever is wrong with sentences, tags, tokenizer or model.
        """
        check_packages()
        start, data = open_start(config), config.data
        parts = read_sentences(data)
        tags = parts["train"].tags
        assert tags is not None
        is_tagger = any("ForTokenClassification" in name for name in start.model_config.architectures or ())
        flat = [tag for sentence in tags for tag in sentence]
        known = start.model_config.id2label if is_tagger else None
        reading = LabelReading("single_label_classification", similar_labels=data.similar_labels)
        labels = find_labels(flat, parts["train"].name, reading, known)
        if not is_tagger:
            labels = Labels(labels.problem_type, tuple(sorted(labels.names, key=lambda name: name != OUTSIDE)), reading)
        described = labels.describe(labels.encode(flat, parts["train"].name))
        described |= {"words": f"{data.text_column_name} of {parts['train'].name}", "tags": data.label_column_name}
        parts = {split: sentences.with_tags_of(labels) for split, sentences in parts.items()}

        def encoded(sentences: Sentences) -> EncodedRows:
            return encode_sentences(
                start.tokenizer, sentences, labels, max_length=data.max_seq_length, token_types=start.token_types
            )

        rows = {split: encoded(sentences) for split, sentences in parts.items()}
        validation, self.test = parts.get("validation"), parts.get("test") if data.predicts else None
        self.test_rows = rows["test"] if self.test else None
        guess = {}
        if validation is not None and validation.tags is not None:
            guess = scores(metrics_of(labels.names), baseline(tags, validation.words), validation.tags)
        settings = {"max_length": data.max_seq_length, "guess": guess, **start.of_rows}
        task = Tagging(labels, validation, data.metric_name, **settings)
        return start.run(task, rows["train"], rows.get("validation"), cluster, labels.by_id, described=described)

    def write_results(self, trainer: "Trainer", figures: dict[str, float] | None, step: int, predict: Predict) -> None:
        """Write the scores, and the tags of the test part."""
        run, task = trainer.run, trainer.run.task
        assert isinstance(task, Tagging)
        train = train_results(trainer, step)
        evaluated = named(figures or {})
        if figures:
            evaluated |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        predicted, lines = {}, None
        if self.test is not None and self.test_rows is not None:
            totals = predict(self.test_rows)
            lines = [" ".join(tags) + "\n" for tags in task.predictions(totals, self.test)]
            if self.test.tags is not None:
                predicted = named(task.figures_of(totals, self.test))
        if not run.cluster.is_chief:
            return
        write_results(run.output_dir, {"train": train, "eval": evaluated, "predict": predicted})
        if lines is not None:
            open_folder(run.output_dir).write_text(TAGS_NAME, "".join(lines))
