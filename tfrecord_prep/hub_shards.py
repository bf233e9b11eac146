"""Shards on the Hub: pushed to a data set repository, and fetched by `hub:NAMESPACE/NAME[/FOLDER][@REVISION]`.

A push is several commits, so that it may be of any size: first the card; then of each split one that deletes the old
manifest and stale files, the shards, some at a time, and at last tokenizer and manifest. Given again after a failure,
the same command continues: what is on the Hub already is neither sent nor committed.

What is fetched is copied to huggingface_hub's cache, and checked there. A revision is resolved to its commit once, so
that all folders, and later starts of a run, are of one state of the repository. The manifest of a folder is put into
the cache last, as on the Hub: with it, all is there, and the Hub is not asked again.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import google_crc32c
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import disable_progress_bars

from mlm_common.cli.console import progress_bar
from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.identity import hub_dataset
from mlm_common.errors import InputError
from mlm_common.hub import push as hub
from mlm_common.hub.push import CARD_NAME, HubRepository, commit_to_branch, failed_push, open_branch, read_file
from mlm_common.hub.redaction import redacted_hash
from mlm_common.hub.retries import configure_sessions, hub_error, one_line, repeat
from mlm_common.mixture import HUB_PREFIX, MIXTURE_NAME, read_mixture
from mlm_common.storage import open_folder
from mlm_common.tokenizer import TOKENIZER_FILES
from tfrecord_prep.manifest import (
    MANAGED_SHARD_NAME,
    MANIFEST_NAME,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    parse_manifest,
    published_manifest,
    read_manifest,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Split = Literal["train", "validation"]

ADDRESS = re.compile(rf"{HUB_PREFIX}({hub.REPO_ID.pattern})(?:/([\w./-]*\w))?(?:@({hub.REF_NAME.pattern}))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
NUM_DOWNLOADS = 8

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

    After a HubPushError splits without a manifest on the Hub are not complete there.
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
            commit = partial(api.create_commit, revision=repository.branch, **repository.address)
            new = huggingface_hub.CommitOperationAdd
            # Each try has new operations: those of a commit whose answer was lost cannot be used again.
            _repeat(lambda: commit(operations=[new(*file) for file in files.items()], commit_message=message))

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


@dataclass(frozen=True)
class HubShards:
    """Fetches folders of shards; `commits` are those of `NAMESPACE/NAME@REVISION`, known before or found here.

    A record that a run has fetched from the Hub has the `redacted_hash` of these names instead.
    """

    commits: dict[str, str] = field(default_factory=dict)

    def local_folder(self, path: str, split: Split) -> str:
        """Return the folder in the cache with the shards at an address, all of them fetched; other paths as they are.

        Without FOLDER that is the folder `split` of the repository or, where it has a `mixture.json`, a folder with
        that file and the folders of this split of its sources. A HubAwayError if the Hub cannot be reached, and
        something is not in the cache.
        """
        if not path.startswith(HUB_PREFIX):
            return path
        match = ADDRESS.fullmatch(path)
        if match is None:
            raise InputError(f"Shards on the Hub must be hub:NAMESPACE/NAME[/FOLDER][@REVISION]; received {path}.")
        repo_id, folder, revision = match[1], match[2], match[3] or hub.MAIN_BRANCH
        configure_sessions()
        disable_progress_bars("huggingface_hub.http_get")  # one per file
        try:
            name = f"{repo_id}@{revision}"
            known = self.commits.get(name) or self.commits.pop(redacted_hash(name), None)
            commit = self.commits[name] = known or _commit(repo_id, revision)
            return _Commit(path, repo_id, commit).fetched(folder, split)
        except InputError:
            raise
        except errors.RevisionNotFoundError as error:
            raise InputError(f"{path}: {repo_id} has no branch, tag or commit {revision}.") from error
        except errors.RepositoryNotFoundError as error:  # also if its terms were not accepted
            raise InputError(
                f"{path}: the Hub shows you no data set {repo_id}. Check the name; if it is private or gated, log in "
                "with `hf auth login`, or set HF_TOKEN, as a user who may read it."
            ) from error
        except (OSError, ValueError) as error:
            raise hub_error(f"{path} cannot be fetched: {one_line(error)}", error) from error


def _commit(repo_id: str, revision: str) -> str:
    if COMMIT.fullmatch(revision):
        return revision
    api = huggingface_hub.HfApi()
    return str(repeat(lambda: api.dataset_info(repo_id, revision=revision), hub.CHECK_RETRY_DELAYS_SECONDS).sha)


@dataclass(frozen=True)
class _Commit:
    """A state of a repository; `path` is the address in errors."""

    path: str
    repo_id: str
    commit: str

    def fetched(self, folder: str | None, split: Split) -> str:
        if folder is None and (mixture_path := self.find(MIXTURE_NAME)):
            root = str(Path(mixture_path).parent)
            for source in (read_mixture(root) or {}).values():
                if (of_source := getattr(source, split)) is not None:
                    self.fetched(of_source, split)
            return root
        folder = folder or split
        manifest_name = f"{folder}/{MANIFEST_NAME}"
        if (in_cache := self.in_cache(manifest_name)) is None:
            self.fetch_split(folder)
            in_cache = self.download(manifest_name)
        return str(Path(in_cache).parent)

    def fetch_split(self, folder: str) -> None:
        """Fetch all files of a split but the manifest."""
        api, manifest_name = huggingface_hub.HfApi(), f"{folder}/{MANIFEST_NAME}"
        try:
            listing = partial(api.list_repo_tree, self.repo_id, folder, revision=self.commit, repo_type="dataset")
            listed = _repeat(lambda: list(listing(recursive=True)))
        except errors.EntryNotFoundError:
            listed = []
        names = {entry.path for entry in listed}
        if manifest_name not in names:
            raise InputError(
                f"{self.path}: {self.repo_id} has no {manifest_name} in commit {self.commit[:12]}. Name the folder of "
                f"a complete split, as --push-to-hub of prepare_tfrecord_shards.py makes it: hub:{self.repo_id}/FOLDER."
            )
        shards = self.read_manifest(manifest_name).shards
        num_bytes = sum(shard.num_bytes for shard in shards if self.in_cache(f"{folder}/{shard.name}") is None)
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        num_free_bytes = shutil.disk_usage(cache).free
        if num_bytes > num_free_bytes:
            raise InputError(
                f"{self.path} needs {num_bytes / 1e9:,.1f} GB in {cache}, where {num_free_bytes / 1e9:,.1f} GB are "
                "free. Set HF_HOME to a folder on a larger disk."
            )
        for name in sorted(names):
            if name.startswith(f"{folder}/{TOKENIZER_FOLDER_NAME}/"):
                self.download(name)
        title, num_bytes = f"Fetching {self.path}, {folder}", sum(shard.num_bytes for shard in shards)
        with progress_bar(title, "B", num_bytes) as bar, ThreadPoolExecutor(NUM_DOWNLOADS) as pool:
            for shard in pool.map(lambda shard: self.fetch_shard(folder, shard), shards):
                bar.update(shard.num_bytes)

    def read_manifest(self, name: str) -> Manifest:
        """Read it past the cache."""
        repository = HubRepository(self.repo_id, "dataset")
        text = _repeat(lambda: read_file(huggingface_hub.HfApi(), repository, self.commit, name))
        return parse_manifest(text, f"{name} of {self.path}")

    def fetch_shard(self, folder: str, shard: ShardRecord) -> ShardRecord:
        copy = Path(self.download(f"{folder}/{shard.name}"))
        if f"{google_crc32c.value(copy.read_bytes()):08x}" != shard.crc32c:
            copy.resolve().unlink()
            raise InputError(
                f"{self.path}: {folder}/{shard.name} does not have the checksum of the manifest. Run the command "
                "again; if it fails again, the shards must be pushed again."
            )
        return shard

    def find(self, name: str) -> str | None:
        """Fetch a file, and return its path in the cache; None if the commit has none."""
        is_known_missing = not isinstance(self._look_up(name), str | None)
        try:
            return None if is_known_missing else self.download(name)
        except errors.EntryNotFoundError:
            return None

    def download(self, name: str) -> str:
        """Fetch a file unless it is in the cache, and return its path there."""

        def download() -> str:
            try:
                return huggingface_hub.hf_hub_download(self.repo_id, name, repo_type="dataset", revision=self.commit)
            except errors.LocalEntryNotFoundError as error:  # the Hub did not answer
                raise error.__cause__ or error from None

        return _repeat(download)

    def in_cache(self, name: str) -> str | None:
        found = self._look_up(name)
        return found if isinstance(found, str) else None

    def _look_up(self, name: str) -> object:
        return huggingface_hub.try_to_load_from_cache(self.repo_id, name, revision=self.commit, repo_type="dataset")
