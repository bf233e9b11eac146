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

from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.identity import hub_dataset, published_bad_rows, published_corpus
from mlm_common.hub import push as hub
from mlm_common.hub.push import (
    CARD_NAME,
    HubRepository,
    commit_to_branch,
    failed_push,
    mark_card,
    open_branch,
    read_file,
)
from mlm_common.hub.retries import configure_sessions, repeat
from mlm_common.storage import open_folder
from mlm_common.tokenizer import TOKENIZER_FILES
from tfrecord_prep.manifest import MANAGED_SHARD_NAME, MANIFEST_NAME, TOKENIZER_FOLDER_NAME, Manifest, read_manifest

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The Hub advises at most 100; this many files of a gs:// folder are copied to this machine at a time.
FILES_PER_COMMIT = 50

# In a split's folder on the Hub: what a push sends, and the next one deletes where it is stale.
SPLIT_FILES = (
    rf"{MANIFEST_NAME}|{MANAGED_SHARD_NAME.pattern.strip('^$')}|{TOKENIZER_FOLDER_NAME}/({TOKENIZER_FILES.pattern})"
)
# Fields of the manifest that are published as they are.
PUBLIC_FIELDS = (
    "format_version", "split", "max_length", "chunking", "sentences_by", "random_share", "shard_size",
    "partition_bytes", "tokenizer", "shards", "totals", "unigram_entropy_nats", "versions",
)  # fmt: skip
CARD = """# {name}

Rows of token ids for pretraining a masked language model, as TFRecord files. {source}

| split | documents | tokens | rows | shards |
| --- | --- | --- | --- | --- |
{splits}

Every row has {max_length} ids (`input_ids`, with an `attention_mask`), cut by `{chunking}`, from a vocabulary of
{vocabulary_size:,}. `SPLIT/tokenizer/` is the tokenizer. `SPLIT/manifest.json` has counts and checksums; a split
without it is not complete."""


def push_shards(
    output_dir: str, split_names: Sequence[str], repository: HubRepository, *, publish_details: bool
) -> None:
    """Push complete splits, `OUTPUT_DIR/SPLIT`, local or `gs://`, and a card.

    Args:
        output_dir: folder of the splits.
        split_names: which ones are pushed.
        repository: where they go.
        publish_details: push the manifests as they are.

    Raises:
        HubPushError: it did not succeed; splits without a manifest on the Hub are not complete there.
    """
    configure_sessions()
    try:
        push = _Push(output_dir, repository, publish_details)
        push.push_card(split_names)
        for name in split_names:
            push.push_split(name)
    except (OSError, RuntimeError, ValueError) as error:
        raise failed_push(repository, output_dir, error) from error
    logger.info("pushed to %s", repository.repo_id)


class _Push:
    def __init__(self, output_dir: str, repository: HubRepository, publish_details: bool):
        from huggingface_hub import HfApi

        self._api = HfApi()
        self._folder = open_folder(output_dir)
        self._repository = repository
        self._publish_details = publish_details

    def push_card(self, split_names: Sequence[str]) -> None:
        """Commit the card, by which the repository is known as this project's if the push stops after it."""
        manifests = [read_manifest(self._folder.path_of(name)) for name in split_names]
        card = dataset_card(self._repository.repo_id, manifests)
        self._commit("Add the card", files={CARD_NAME: card.encode()})

    def push_split(self, split_name: str) -> None:
        folder = self._folder.subfolder(split_name)
        manifest_path = f"{split_name}/{MANIFEST_NAME}"
        manifest = folder.read_bytes(MANIFEST_NAME)
        if not self._publish_details:
            published = published_manifest(json.loads(manifest))
            manifest = (json.dumps(published, indent=2, ensure_ascii=False) + "\n").encode()
        branch = _repeat(lambda: open_branch(self._api, self._repository))
        if manifest_path in branch.paths and manifest.decode() == _repeat(
            lambda: read_file(self._api, self._repository, branch.commit, manifest_path)
        ):
            logger.info("the split %s on the Hub is up to date", split_name)
            return
        shards = [f"{split_name}/{shard.name}" for shard in read_manifest(folder.path).shards]
        names = folder.subfolder(TOKENIZER_FOLDER_NAME).list_files()
        last = [f"{split_name}/{TOKENIZER_FOLDER_NAME}/{name}" for name in names if TOKENIZER_FILES.fullmatch(name)]
        stale = f"{re.escape(split_name)}/({SPLIT_FILES})"
        self._commit(f"Begin {split_name}", stale=stale, kept=[*shards, *last])
        for start in range(0, len(shards), FILES_PER_COMMIT):
            batch = shards[start : start + FILES_PER_COMMIT]
            self._add(f"{split_name}: shards {start + 1:,} to {start + len(batch):,} of {len(shards):,}", batch)
        self._add(f"Complete {split_name}", last, {manifest_path: manifest})

    def _commit(self, message: str, **changes: Any) -> None:
        _repeat(lambda: commit_to_branch(self._api, self._repository, message, **changes))

    def _add(self, message: str, paths: list[str], contents: Mapping[str, bytes] | None = None) -> None:
        """Commit files of the output folder, of a `gs://` one by way of copies on this machine, and others.

        These commits do not read the branch first: its listing may be long.
        """
        from huggingface_hub import CommitOperationAdd

        where = {"revision": self._repository.branch, **self._repository.address}
        with self._folder.local_copy(paths) as copy:
            files: dict[str, Path | bytes] = {path: Path(copy, path) for path in paths} | dict(contents or {})

            def commit() -> None:
                operations = [CommitOperationAdd(path, content) for path, content in files.items()]
                self._api.create_commit(operations=operations, commit_message=message, **where)

            _repeat(commit)


def _repeat(function: Callable[[], Result]) -> Result:
    return repeat(function, hub.RETRY_DELAYS_SECONDS)


def published_manifest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize a `manifest.json` for publishing; counts and checksums stay, which verify the shards."""
    published = {name: record[name] for name in PUBLIC_FIELDS if name in record}
    published["corpus"] = published_corpus(record["corpus"])
    return published | {"bad_rows": published_bad_rows(record.get("bad_rows"))}


def dataset_card(repo_id: str, manifests: Sequence[Manifest]) -> str:
    """Write the README.md of a repository with these splits."""
    from huggingface_hub import DatasetCardData

    first = manifests[0]
    settings = first.corpus["settings"]
    source = "Its text is not named here: it came from files."
    if settings["dataset_name"] == BUILTIN:
        source = "Its text: docstrings of Python's standard library and of installed packages."
    elif name := hub_dataset(first.corpus):
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
    text = CARD.format(
        name=repo_id.partition("/")[2],
        source=source,
        splits="\n".join(splits),
        max_length=first.max_length,
        chunking=first.chunking,
        vocabulary_size=first.tokenizer.vocabulary_size,
    )
    return mark_card(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
