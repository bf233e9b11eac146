"""Scores of tagged words: entities by seqeval, of other tags the share of words that are right."""

import importlib.util
import warnings
from collections import Counter
from collections.abc import Sequence

from finetuning.data.tagged import OUTSIDE
from mlm_common.errors import InputError

ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")
TAG_METRICS = ("accuracy",)
# How the tags of entities begin, in the schemes IOB1, IOB2, IOE and IOBES.
ENTITY_PREFIXES = ("B-", "I-", "E-", "S-")

Tags = Sequence[Sequence[str]]


def check_packages() -> None:
    """Check that what computes scores is installed.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec("seqeval") is None:
        raise InputError("Scores of entities need seqeval, which is missing: pip install -e '.[finetuning]'.")


def metrics_of(tag_names: Sequence[str]) -> tuple[str, ...]:
    """Choose the metrics of such tags; the first is the one by which checkpoints are compared."""
    return ENTITY_METRICS if any(name.startswith(ENTITY_PREFIXES) for name in tag_names) else TAG_METRICS


def scores(metrics: Sequence[str], predictions: Tags, references: Tags) -> dict[str, float]:
    """Compute metrics over all words of all sentences; an entity is right if its bounds and its kind are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no entity is predicted: 0
        from seqeval import metrics as seqeval

        functions = {"f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score}
        functions["accuracy"] = seqeval.accuracy_score
        return {name: float(functions[name](list(references), list(predictions))) for name in metrics}


def baseline(train_tags: Tags, words: Sequence[Sequence[str]]) -> list[list[str]]:
    """Guess without the text: for each word the most frequent tag of the training part."""
    (tag, _), *_ = Counter(tag for sentence in train_tags for tag in sentence).most_common(1)
    return [[tag] * len(sentence) for sentence in words]


def is_degenerate(predictions: Tags) -> bool:
    """Tell whether all words of several have the same tag: nothing was learned."""
    counts = Counter(tag for sentence in predictions for tag in sentence)
    return len(counts) == 1 and counts.total() > 1


def default_tag(tag_names: Sequence[str]) -> int:
    """Choose what a word has that the model did not see, since its row was cut: `O`, or the first tag."""
    return tag_names.index(OUTSIDE) if OUTSIDE in tag_names else 0
