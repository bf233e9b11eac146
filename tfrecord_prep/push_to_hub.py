"""Shards as a data set repository on the Hugging Face Hub, in which a split's manifest is there only when all of it is.

The push goes in several commits, so that it may be as large as one likes: of a split first its old manifest and files
that are no longer in it are deleted, then come the shards, some at a time, and with the last commit tokenizer and
manifest. Given again after a failure, it resumes where it was: what is there already is neither sent nor committed.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.hub import push as hub
from mlm_common.hub.push import HubRepository, ensure_repository, failed_push
from mlm_common.hub.retries import configure_sessions, repeat
from mlm_common.storage import open_folder
from tfrecord_prep.manifest import MANIFEST_NAME, TOKENIZER_FOLDER_NAME, Manifest, read_manifest
from tokenizer_training.corpus.config import BUILTIN

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


logger = logging.getLogger(__name__)

# The Hub advises at most 100; of a gs:// folder so many are copied to this machine at a time.
FILES_PER_COMMIT = 50

CARD_NAME = "README.md"
CARD = """# {name}

Rows of token ids for pretraining a masked language model, as TFRecord files. {source}

| split | documents | tokens | rows | shards |
| --- | --- | --- | --- | --- |
{splits}

Every row has {max_length} ids (`input_ids`, with an `attention_mask`), cut by `{chunking}`, from a vocabulary of
{vocabulary_size:,}. `SPLIT/tokenizer/` is the tokenizer. `SPLIT/manifest.json` has counts and checksums; a split
without it is not complete."""


def push_shards(output_dir: str, split_names: Sequence[str], repository: HubRepository) -> None:
    """Push complete splits, `OUTPUT_DIR/SPLIT`, local or `gs://`, and a card.

    Raises:
        HubPushError: it did not succeed; splits without a manifest on the Hub are not complete there.
    """
    configure_sessions()
    try:
        _Push(output_dir, repository).push(split_names)
    except (OSError, RuntimeError, ValueError) as error:
        raise failed_push(repository, output_dir, error) from error
    logger.info("pushed to %s", repository.repo_id)


class _Push:
    def __init__(self, output_dir: str, repository: HubRepository):
        from huggingface_hub import HfApi

        self._api = HfApi()
        self._folder = open_folder(output_dir)
        self._repository = repository
        self._target: dict[str, Any] = {
            "repo_id": repository.repo_id,
            "repo_type": repository.kind,
            "revision": repository.branch,
        }

    def push(self, split_names: Sequence[str]) -> None:
        _repeat(lambda: ensure_repository(self._api, self._repository))
        for name in split_names:
            self._push_split(name)
        manifests = [read_manifest(self._folder.path_of(name)) for name in split_names]
        card = dataset_card(self._repository.repo_id, manifests)
        self._commit("Add the card", {CARD_NAME: card.encode()})

    def _push_split(self, split_name: str) -> None:
        folder = self._folder.subfolder(split_name)
        manifest_path = f"{split_name}/{MANIFEST_NAME}"
        manifest = folder.read_bytes(MANIFEST_NAME)
        there = _repeat(lambda: self._files_there(split_name))
        if manifest_path in there and _is_same(there[manifest_path], manifest):
            logger.info("%s is on the Hub as it is here", split_name)
            return
        shards = [f"{split_name}/{shard.name}" for shard in read_manifest(folder.path).shards]
        names = folder.subfolder(TOKENIZER_FOLDER_NAME).list_files()
        last = [f"{split_name}/{TOKENIZER_FOLDER_NAME}/{name}" for name in names]
        self._delete(f"Begin {split_name}", sorted(set(there) - {*shards, *last}))
        for start in range(0, len(shards), FILES_PER_COMMIT):
            batch = shards[start : start + FILES_PER_COMMIT]
            self._commit_files(
                f"{split_name}: shards {start + 1:,} to {start + len(batch):,} of {len(shards):,}", batch
            )
        self._commit_files(f"Complete {split_name}", [*last, manifest_path])

    def _files_there(self, split_name: str) -> dict[str, "RepoFile"]:
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        try:
            entries = list(self._api.list_repo_tree(path_in_repo=split_name, recursive=True, **self._target))
        except EntryNotFoundError:
            return {}
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _delete(self, message: str, paths: list[str]) -> None:
        from huggingface_hub import CommitOperationDelete

        if not paths:
            return

        def delete() -> None:
            # Of a try whose answer was lost nothing may be left to delete.
            left = self._files_there(paths[0].partition("/")[0])
            operations = [CommitOperationDelete(path) for path in paths if path in left]
            if operations:
                self._api.create_commit(operations=operations, commit_message=message, **self._target)

        _repeat(delete)

    def _commit_files(self, message: str, paths: list[str]) -> None:
        """Commit files of the output folder; of a `gs://` one by way of copies on this machine."""
        with self._folder.local_copy(paths) as copy:
            self._commit(message, {path: Path(copy, path) for path in paths})

    def _commit(self, message: str, contents: dict[str, Path | bytes]) -> None:
        from huggingface_hub import CommitOperationAdd

        def commit() -> None:
            operations = [CommitOperationAdd(path, content) for path, content in contents.items()]
            self._api.create_commit(operations=operations, commit_message=message, **self._target)

        _repeat(commit)


def _repeat(function: Callable[[], Any]) -> Any:
    return repeat(function, hub.RETRY_DELAYS_SECONDS)


def _is_same(file: "RepoFile", content: bytes) -> bool:
    """Tell whether a file on the Hub has that content; a small one is known by git's id."""
    if file.lfs is not None:
        return file.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return file.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def dataset_card(repo_id: str, manifests: Sequence[Manifest]) -> str:
    """Write the README.md of a repository with these splits."""
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
    text = CARD.format(
        name=repo_id.partition("/")[2],
        source=source,
        splits="\n".join(splits),
        max_length=first.max_length,
        chunking=first.chunking,
        vocabulary_size=first.tokenizer.vocabulary_size,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}\n"
