"""Scores of tagged words: entities by seqeval, of other tags the share of words that are right."""

import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

from finetuning.data.tagged import OUTSIDE
from mlm_common.errors import InputError

ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")
TAG_METRICS = ("accuracy",)
# How the tags of entities begin, in the schemes IOB1, IOB2, IOE, IOBES and BILOU.
ENTITY_PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")
# What IOBES, which seqeval reads, has for the tags of BILOU.
IOBES_PREFIXES = {"L-": "E-", "U-": "S-"}
# The same written in other ways: as suffixes, or with an underscore.
OTHER_ENTITY_TAG = re.compile(r"[BIESLU]_.+|.+[-_][BIESLU]")

Tags = Sequence[Sequence[str]]


def check_packages() -> None:
    """Check that what computes scores is installed.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec("seqeval") is None:
        raise InputError("Scores of entities need seqeval, which is missing: pip install -e '.[finetuning]'.")


def metrics_of(tag_names: Sequence[str]) -> tuple[str, ...]:
    """Choose the metrics of such tags: those of entities if most have a prefix. The first compares checkpoints."""
    return ENTITY_METRICS if _are_most(tag_names, lambda name: name.startswith(ENTITY_PREFIXES)) else TAG_METRICS


def hint_of(tag_names: Sequence[str]) -> str | None:
    """Return a hint where the tags look like those of entities but are not written as seqeval reads them."""
    if metrics_of(tag_names) == ENTITY_METRICS or not _are_most(tag_names, OTHER_ENTITY_TAG.fullmatch):
        return None
    example = next(name for name in tag_names if OTHER_ENTITY_TAG.fullmatch(name))
    return (
        f"Tags such as {example} look like those of entities, but without a prefix as in B-PER they are scored word by "
        "word, by accuracy alone. Rewrite them as B-PER and I-PER for the F1 of entities."
    )


def _are_most(tag_names: Sequence[str], holds: Callable[[str], object]) -> bool:
    names = [name for name in tag_names if name != OUTSIDE]
    return 2 * sum(bool(holds(name)) for name in names) > len(names)


def scores(metrics: Sequence[str], predictions: Tags, references: Tags) -> dict[str, float]:
    """Compute metrics over all words of all sentences; an entity is right if its bounds and its kind are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no entity is predicted: 0
        from seqeval import metrics as seqeval

        functions = {"f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score}
        functions["accuracy"] = seqeval.accuracy_score
        iobes = [_as_iobes(references), _as_iobes(predictions)]
        return {name: float(functions[name](*iobes)) for name in metrics}


def _as_iobes(tags: Tags) -> list[list[str]]:
    return [[IOBES_PREFIXES.get(tag[:2], tag[:2]) + tag[2:] for tag in sentence] for sentence in tags]


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
