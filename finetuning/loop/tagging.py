"""A run of tagging: its sentences and model opened, its results written."""

import logging
from typing import TYPE_CHECKING

from finetuning.config.settings import TaggingConfig
from finetuning.data.labels import LabelReading, Labels, find_labels
from finetuning.data.rows import EncodedRows
from finetuning.data.tagged import OUTSIDE, Sentences, encode_sentences, read_sentences
from finetuning.loop.model import open_start
from finetuning.loop.results import EVAL_NAME, named, tags_text, train_results, write_results
from finetuning.loop.training import Job, Predict
from finetuning.scores.tagging import baseline, check_packages, hint_of, metrics_of, scores
from finetuning.tasks.tagging import Tagging
from train.loop.run import Run
from train.runtime.machines import Cluster

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

# The file with the tags of the test part, without its ending.
TAGS_NAME = "predictions"


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
        described["first tags"] = " ".join(map(str, tags[0]))
        parts = {split: sentences.with_tags_of(labels) for split, sentences in parts.items()}
        if hint := hint_of(labels.names):
            logger.warning("%s", hint)

        def encoded(sentences: Sentences) -> EncodedRows:
            return encode_sentences(
                start.tokenizer, sentences, labels, max_length=data.max_seq_length, token_types=start.token_types
            )

        rows = {split: encoded(sentences) for split, sentences in parts.items()}
        self.validation = (parts["validation"], rows["validation"]) if "validation" in parts else None
        self.test = (parts["test"], rows["test"]) if "test" in parts and data.predicts else None
        validation = parts.get("validation")
        guess = {}
        if validation is not None and validation.tags is not None:
            guessed = baseline(parts["train"].tags or (), validation.words)
            guess = scores(metrics_of(labels.names), guessed, validation.tags)
        settings = {"max_length": data.max_seq_length, "guess": guess, **start.of_rows}
        task = Tagging(labels, validation, data.metric_name, **settings)
        return start.run(task, rows["train"], rows.get("validation"), cluster, labels.by_id, described=described)

    def write_results(
        self,
        trainer: "Trainer",
        figures: dict[str, float] | None,  # noqa: ARG002
        step: int,
        predict: Predict,
    ) -> dict[str, float] | None:
        """Tag the validation and test parts; write the tags and, where the right ones are known, their scores."""
        run, task = trainer.run, trainer.phase.task
        assert isinstance(task, Tagging)
        train = train_results(trainer, step)
        tags: dict[str, list[list[str]]] = {}

        def figures_of(name: str, sentences: Sentences, rows: EncodedRows) -> dict[str, float]:
            totals = predict(rows)
            tags[name] = task.predictions(totals, sentences)
            return task.figures_of(totals, sentences) if sentences.tags is not None else {}

        evaluated = figures_of(EVAL_NAME, *self.validation) if self.validation else None
        predicted = figures_of(TAGS_NAME, *self.test) if self.test else {}
        if not run.cluster.is_chief:
            return evaluated
        for name, of_part in tags.items():
            run.folder.files.write_text(f"{name}.txt", tags_text(of_part))
        eval_results = named(evaluated or {})
        if evaluated:
            eval_results |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        write_results(run.folder.files, {"train": train, "eval": eval_results, "predict": named(predicted)})
        return evaluated
