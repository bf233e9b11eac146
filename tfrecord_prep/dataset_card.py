"""The card of a data set repository with shards: README.md.

Metadata: https://huggingface.co/docs/hub/datasets-cards.
"""

from collections.abc import Sequence

from tfrecord_prep.manifest import Manifest
from tokenizer_training.corpus_config import BUILTIN

CARD_NAME = "README.md"
TEXT = """# {name}

Rows of token ids for pretraining a masked language model, as TFRecord files. {source}

| split | documents | tokens | rows | shards |
| --- | --- | --- | --- | --- |
{splits}

Every row has {max_length} ids (`input_ids`, with an `attention_mask`), cut by `{chunking}`, from a vocabulary of
{vocabulary_size:,}. `SPLIT/tokenizer/` is the tokenizer. `SPLIT/manifest.json` has counts and checksums; a split
without it is not complete."""


def dataset_card(repo_id: str, manifests: Sequence[Manifest]) -> str:
    """Return the README.md of a repository with these splits."""
    from huggingface_hub import DatasetCardData

    first = manifests[0]
    settings = first.corpus["settings"]
    name = settings["dataset_name"]
    source = "Its text is not named here: it came from files."
    if name == BUILTIN:
        source = "Its text: docstrings of Python's standard library and of installed packages."
    elif name is not None:
        revision = settings["dataset_revision"]
        source = f"Its text: `{name}`" + (f", revision `{revision}`." if revision else ", its main branch at the time.")
    data = DatasetCardData(
        pretty_name=repo_id.partition("/")[2],
        task_categories=["fill-mask"],
        tags=["tfrecord", "tokenized", "masked-lm"],
    )
    splits = [
        f"| {one.split} | {one.totals.num_documents:,} | {one.totals.num_tokens:,} | {one.totals.num_rows:,} "
        f"| {len(one.shards):,} |"
        for one in manifests
    ]
    text = TEXT.format(
        name=repo_id.partition("/")[2],
        source=source,
        splits="\n".join(splits),
        max_length=first.max_length,
        chunking=first.chunking,
        vocabulary_size=first.tokenizer.vocabulary_size,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}\n"
