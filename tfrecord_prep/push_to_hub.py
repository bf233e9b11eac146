"""Push shards to a data set repository on the Hugging Face Hub; a split there is complete once it has a manifest.

The push is several commits, so that it may be of any size: first the card; then of each split one that deletes the old
manifest and stale files, the shards, some at a time, and at last tokenizer and manifest. Given again after a failure,
the same command continues: what is on the Hub already is neither sent nor committed.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub

from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.identity import hub_dataset
from mlm_common.hub import push as hub
from mlm_common.hub.push import CARD_NAME, HubRepository, commit_to_branch, failed_push, open_branch, read_file
from mlm_common.hub.retries import configure_sessions, repeat
from mlm_common.mixture import MIXTURE_NAME
from mlm_common.storage import open_folder
from mlm_common.tokenizer import TOKENIZER_FILES
from tfrecord_prep.manifest import (
    MANAGED_SHARD_NAME,
    MANIFEST_NAME,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    published_manifest,
    read_manifest,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The Hub advises at most 100; this many files of a gs:// folder are copied to this machine at a time.
FILES_PER_COMMIT = 50

# In a split's folder on the Hub: what a push sends, and the next one deletes where it is stale.
SPLIT_FILES = (
    rf"{MANIFEST_NAME}|{MANAGED_SHARD_NAME.pattern.strip('^$')}|{TOKENIZER_FOLDER_NAME}/({TOKENIZER_FILES.pattern})"
)
CARD = """---
{metadata}
---

# {name}

Rows of token ids for pretraining a masked language model, as TFRecord files. {source}

| split | documents | tokens | rows | shards |
| --- | --- | --- | --- | --- |
{splits}

Every row has {max_length} ids (`input_ids`, with an `attention_mask`), cut by `{chunking}`, from a vocabulary of
{vocabulary_size:,}. `SPLIT/tokenizer/` is the tokenizer. `SPLIT/manifest.json` has counts and checksums; a split
without it is not complete.
"""


def push_shards(output_dir: str, folders: Sequence[str], repository: HubRepository, *, publish_details: bool) -> None:
    """Push complete splits, whose `folders` are SPLIT or SOURCE/SPLIT, a card, and last `mixture.json` if there is one.

    Raises:
        HubPushError: it did not succeed; splits without a manifest on the Hub are not complete there.
    """
    configure_sessions()
    folder, api = open_folder(output_dir), huggingface_hub.HfApi()
    manifests = {name: read_manifest(folder.path_of(name)) for name in folders}
    card = dataset_card(repository.repo_id, manifests).encode()
    try:
        # By the card the repository is known as this project's if the push stops after it.
        _repeat(lambda: commit_to_branch(api, repository, "Add the card", files={CARD_NAME: card}))
        for name, manifest in manifests.items():
            _push_split(api, output_dir, name, manifest, repository, publish_details=publish_details)
        if folder.exists(MIXTURE_NAME):
            mixture = {MIXTURE_NAME: folder.read_bytes(MIXTURE_NAME)}
            _repeat(lambda: commit_to_branch(api, repository, "List the sources", files=mixture))
    except (OSError, RuntimeError, ValueError) as error:
        raise failed_push(repository, output_dir, error) from error
    logger.info("pushed to %s", repository.repo_id)


def _push_split(
    api: huggingface_hub.HfApi,
    output_dir: str,
    split: str,
    manifest: Manifest,
    repository: HubRepository,
    *,
    publish_details: bool,
) -> None:
    output = open_folder(output_dir)
    manifest_path = f"{split}/{MANIFEST_NAME}"
    content = output.read_bytes(manifest_path)
    if not publish_details:
        content = (json.dumps(published_manifest(json.loads(content)), indent=2, ensure_ascii=False) + "\n").encode()
    branch = _repeat(lambda: open_branch(api, repository))
    if manifest_path in branch.paths and content.decode() == _repeat(
        lambda: read_file(api, repository, branch.commit, manifest_path)
    ):
        logger.info("the split %s on the Hub is up to date", split)
        return

    def add(message: str, paths: list[str], contents: Mapping[str, bytes]) -> None:
        """Commit files of the output folder, of a `gs://` one by way of copies on this machine, and others.

        These commits do not read the branch first: its listing may be long.
        """
        with output.local_copy(paths) as copy:
            files: dict[str, Path | bytes] = {path: Path(copy, path) for path in paths} | dict(contents)
            where = {"revision": repository.branch, **repository.address}
            _repeat(
                lambda: api.create_commit(
                    operations=[huggingface_hub.CommitOperationAdd(path, file) for path, file in files.items()],
                    commit_message=message,
                    **where,
                )
            )

    shards = [f"{split}/{shard.name}" for shard in manifest.shards]
    names = output.subfolder(f"{split}/{TOKENIZER_FOLDER_NAME}").list_files()
    last = [f"{split}/{TOKENIZER_FOLDER_NAME}/{name}" for name in names if TOKENIZER_FILES.fullmatch(name)]
    stale = f"{re.escape(split)}/({SPLIT_FILES})"
    _repeat(lambda: commit_to_branch(api, repository, f"Begin {split}", stale=stale, kept=[*shards, *last]))
    for start in range(0, len(shards), FILES_PER_COMMIT):
        batch = shards[start : start + FILES_PER_COMMIT]
        add(f"{split}: shards {start + 1:,} to {start + len(batch):,} of {len(shards):,}", batch, {})
    add(f"Complete {split}", last, {manifest_path: content})


def _repeat(function: Callable[[], Result]) -> Result:
    return repeat(function, hub.RETRY_DELAYS_SECONDS)


def dataset_card(repo_id: str, manifests: Mapping[str, Manifest]) -> str:
    """Write the README.md of a repository with these splits, by their folders."""
    first, name = next(iter(manifests.values())), repo_id.partition("/")[2]
    sources = " ".join(dict.fromkeys(_describe_text(one.corpus) for one in manifests.values()))
    metadata = huggingface_hub.DatasetCardData(
        pretty_name=name, task_categories=["fill-mask"], tags=["tfrecord", "tokenized", "masked-lm"]
    )
    splits = [
        f"| {folder} | {one.totals.num_documents:,} | {one.totals.num_tokens:,} | {one.totals.num_rows:,} "
        f"| {len(one.shards):,} |"
        for folder, one in manifests.items()
    ]
    return CARD.format(
        metadata=metadata.to_yaml(),
        name=name,
        source=sources,
        splits="\n".join(splits),
        max_length=first.max_length,
        chunking=first.chunking,
        vocabulary_size=first.tokenizer.vocabulary_size,
    )


def _describe_text(corpus: Mapping[str, Any]) -> str:
    settings = corpus["settings"]
    if settings["dataset_name"] == BUILTIN:
        return "Its text: docstrings of Python's standard library and of installed packages."
    if dataset := hub_dataset(corpus):
        revision = settings["dataset_revision"]
        return f"Its text: `{dataset}`" + (
            f", revision `{revision}`." if revision else ", its main branch at the time."
        )
    return "Its text is not named here: it came from files."
