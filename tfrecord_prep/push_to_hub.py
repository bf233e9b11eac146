"""Shards as a data set repository on the Hugging Face Hub, in which a split's manifest is there only when all of it is.

The push goes in several commits, so that it may be as large as one likes: of a split first all that will come is
listed, and its old manifest and what is no longer in it is deleted; then come the shards, some at a time, and with the
last commit tokenizer and manifest. Given again after a failure, it resumes where it was: what is there already is
neither sent nor committed.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.published_corpus import hub_dataset, published_bad_rows, published_corpus
from mlm_common.hub import push as hub
from mlm_common.hub.own_files import CARD_NAME, FormerPush, OwnFiles, git_sha1
from mlm_common.hub.push import HubRepository, failed_push, open_repository
from mlm_common.hub.redaction import redact_except
from mlm_common.hub.retries import configure_sessions, repeat
from mlm_common.storage import open_folder
from mlm_common.tokenizer import TOKENIZER_FILES
from tfrecord_prep.manifest import MANIFEST_NAME, TOKENIZER_FOLDER_NAME, Manifest, read_manifest

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


logger = logging.getLogger(__name__)

# The Hub advises at most 100; of a gs:// folder so many are copied to this machine at a time.
FILES_PER_COMMIT = 50

FORMER_PUSH = FormerPush(
    proof=CARD_NAME,
    marks=("Rows of token ids for pretraining a masked language model, as TFRecord files.",),
    names=rf"{CARD_NAME}|[^/]+/(manifest\.json|dataset-\d{{5,}}-\d{{5,}}-\d+\.tfrecord)"
    rf"|[^/]+/{TOKENIZER_FOLDER_NAME}/({TOKENIZER_FILES.pattern})",
)
# Of the manifest: as they are. The corpus is published in part, all else withheld.
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
        split_names: of those that are pushed.
        repository: where they go.
        publish_details: push the manifests as they are.

    Raises:
        HubPushError: it did not succeed; splits without a manifest on the Hub are not complete there.
    """
    configure_sessions()
    try:
        _Push(output_dir, repository, publish_details).push(split_names)
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

    def push(self, split_names: Sequence[str]) -> None:
        for name in split_names:
            self._push_split(name)
        manifests = [read_manifest(self._folder.path_of(name)) for name in split_names]
        card = dataset_card(self._repository.repo_id, manifests)
        self._commit("Add the card", lambda: self._own_files().operations({CARD_NAME: card.encode()}))

    def _push_split(self, split_name: str) -> None:
        folder = self._folder.subfolder(split_name)
        manifest_path = f"{split_name}/{MANIFEST_NAME}"
        manifest = folder.read_bytes(MANIFEST_NAME)
        if not self._publish_details:
            published = published_manifest(json.loads(manifest))
            manifest = (json.dumps(published, indent=2, ensure_ascii=False) + "\n").encode()
        there = _repeat(self._own_files).there
        if manifest_path in there and _is_same(there[manifest_path], manifest):
            logger.info("%s is on the Hub as it is here", split_name)
            return
        shards = [f"{split_name}/{shard.name}" for shard in read_manifest(folder.path).shards]
        names = folder.subfolder(TOKENIZER_FOLDER_NAME).list_files()
        last = [f"{split_name}/{TOKENIZER_FOLDER_NAME}/{name}" for name in names if TOKENIZER_FILES.fullmatch(name)]

        def begin() -> list[Any]:
            own = self._own_files()
            stale = [path for path in own.listed - {*shards, *last} if path.startswith(f"{split_name}/")]
            return own.operations({}, announced=[*shards, *last, manifest_path], deleted=stale)

        self._commit(f"Begin {split_name}", begin)
        for start in range(0, len(shards), FILES_PER_COMMIT):
            batch = shards[start : start + FILES_PER_COMMIT]
            self._commit_files(
                f"{split_name}: shards {start + 1:,} to {start + len(batch):,} of {len(shards):,}", batch
            )
        self._commit_files(f"Complete {split_name}", last, {manifest_path: manifest})

    def _commit_files(self, message: str, paths: list[str], contents: Mapping[str, bytes] | None = None) -> None:
        """Commit files of the output folder, of a `gs://` one by way of copies on this machine, and others."""
        from huggingface_hub import CommitOperationAdd

        with self._folder.local_copy(paths) as copy:
            files: dict[str, Path | bytes] = {path: Path(copy, path) for path in paths} | dict(contents or {})
            self._commit(message, lambda: [CommitOperationAdd(path, content) for path, content in files.items()])

    def _commit(self, message: str, operations: Callable[[], list[Any]]) -> None:
        def commit() -> None:
            target = self._repository.target
            self._api.create_commit(operations=operations(), commit_message=message, **target)

        _repeat(commit)

    def _own_files(self) -> OwnFiles:
        return open_repository(self._api, self._repository)


def _repeat(function: Callable[[], Any]) -> Any:
    return repeat(function, hub.RETRY_DELAYS_SECONDS)


def _is_same(file: "RepoFile", content: bytes) -> bool:
    """Tell whether a file on the Hub has that content; a small one is known by git's id."""
    if file.lfs is not None:
        return file.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return file.blob_id == git_sha1(content)


def published_manifest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold of a `manifest.json` what is its owner's; counts and checksums stay, which verify the shards."""
    published = {"corpus": published_corpus(record["corpus"]), "bad_rows": published_bad_rows(record.get("bad_rows"))}
    return redact_except(record, PUBLIC_FIELDS) | published


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
    return f"---\n{data.to_yaml()}\n---\n\n{text}\n"
