"""Push shards to a data set repository on the Hub, and fetch them from `hub:NAMESPACE/NAME[/FOLDER][@REVISION]`.

A push makes several commits, so that it can be of any size. The first commit adds the card. Then for each split one
commit deletes the old manifest and stale files, several commits add the shards, and a last commit adds the tokenizer
and the manifest. After a failure the same command continues: files that are already on the Hub are not sent again.

Fetched files are copied to huggingface_hub's cache and checked there. A revision is resolved to its commit only once,
so that all folders, and later starts of a run, see the same state of the repository. The manifest of a folder is the
last file to be cached. Once the manifest is in the cache, the folder is complete and the Hub is not asked again.
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

# The Hub recommends at most 100 files per commit. Files in gs:// are copied to this machine in groups of this size.
FILES_PER_COMMIT = 50

# The files that a push sends to a split's folder on the Hub, and that a later push deletes if they are stale.
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
    """Push a card, then the splits that are complete, and finally `mixture.json` if there is one.

    Args:
        output_dir: output folder of the preparation, local or `gs://`.
        folders: SPLIT or SOURCE/SPLIT of each split.
        repository: where to push.
        publish_details: whether to publish the paths of the corpus in the manifests.

    Raises:
        HubPushError: the push failed. A split without a manifest on the Hub is incomplete.
    """
    configure_sessions()
    folder, api = open_folder(output_dir), huggingface_hub.HfApi()
    manifests = {name: read_manifest(folder.path_of(name)) for name in folders}
    card = dataset_card(repository.repo_id, manifests).encode()
    try:
        # The card comes first: it marks the repository as this project's, even if the push stops right after it.
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
        """Commit files of the output folder (copied to this machine first if it is in `gs://`) and other contents.

        Does not read the branch first, because its list of files may be long.
        """
        with output.local_copy(paths) as copy:
            files: dict[str, Path | bytes] = {path: Path(copy, path) for path in paths} | dict(contents)
            commit = partial(api.create_commit, revision=repository.branch, **repository.address)
            new = huggingface_hub.CommitOperationAdd
            # Each attempt makes new operations, because operations cannot be reused after a commit that got no answer.
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
    """Return the README.md of a repository with these splits; `manifests` are keyed by the folders of the splits."""
    first, name = next(iter(manifests.values())), repo_id.partition("/")[2]
    sources = " ".join(dict.fromkeys(_describe_text(manifest.corpus) for manifest in manifests.values()))
    metadata = huggingface_hub.DatasetCardData(
        pretty_name=name, task_categories=["fill-mask"], tags=["tfrecord", "tokenized", "masked-lm"]
    )
    splits = [
        f"| {folder} | {manifest.totals.num_documents:,} | {manifest.totals.num_tokens:,} "
        f"| {manifest.totals.num_rows:,} | {len(manifest.shards):,} |"
        for folder, manifest in manifests.items()
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
        return "The text is the docstrings of Python's standard library and of installed packages."
    if dataset := hub_dataset(corpus):
        revision = settings["dataset_revision"]
        state = f"revision `{revision}`" if revision else "the main branch at the time"
        return f"The text is the data set `{dataset}`, {state}."
    return "The text came from files that are not named here."


@dataclass(frozen=True)
class HubShards:
    """Fetches folders of shards from the Hub.

    Attributes:
        commits: {NAMESPACE/NAME@REVISION: commit}. Commits from an earlier start of the run may be passed in, and
            commits that are resolved here are added. In a run's record that was fetched from the Hub, each name is
            replaced with its `redacted_hash`.
    """

    commits: dict[str, str] = field(default_factory=dict)

    def local_folder(self, path: str, split: Split) -> str:
        """Fetch the shards at a `hub:` address and return their folder in the cache. Return other paths unchanged.

        An address without FOLDER means the folder `split` of the repository. If the repository has a `mixture.json`,
        the address means the folder of that file, and this split of every source is fetched.

        Raises:
            InputError: the address is malformed, or the Hub has no such data set, revision or complete split.
            HubAwayError: a file is not in the cache, and the Hub cannot be reached.
        """
        if not path.startswith(HUB_PREFIX):
            return path
        match = ADDRESS.fullmatch(path)
        if match is None:
            raise InputError(
                f"The address of shards on the Hub must be hub:NAMESPACE/NAME[/FOLDER][@REVISION]; received {path}."
            )
        repo_id, folder, revision = match[1], match[2], match[3] or hub.MAIN_BRANCH
        configure_sessions()
        disable_progress_bars("huggingface_hub.http_get")  # there would be one progress bar for each file
        try:
            name = f"{repo_id}@{revision}"
            known_commit = self.commits.get(name) or self.commits.pop(redacted_hash(name), None)
            commit = self.commits[name] = known_commit or _commit(repo_id, revision)
            return _Commit(path, repo_id, commit).fetch(folder, split)
        except InputError:
            raise
        except errors.RevisionNotFoundError as error:
            raise InputError(f"{path}: {repo_id} has no branch, tag or commit {revision}.") from error
        except errors.RepositoryNotFoundError as error:  # also raised if its terms were not accepted
            raise InputError(
                f"{path}: the Hub found no data set {repo_id}. Check the name. If the data set is private or "
                "gated, log in with `hf auth login` as a user who may read it, or set HF_TOKEN."
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
    """A commit of a repository; `path` is the address that errors name."""

    path: str
    repo_id: str
    commit: str

    def fetch(self, folder: str | None, split: Split) -> str:
        """Fetch a folder, or this split of all sources if `folder` is None; return the path in the cache."""
        if folder is None and (mixture_path := self.find(MIXTURE_NAME)):
            root = str(Path(mixture_path).parent)
            for source in (read_mixture(root) or {}).values():
                if (source_folder := getattr(source, split)) is not None:
                    self.fetch(source_folder, split)
            return root
        folder = folder or split
        manifest_name = f"{folder}/{MANIFEST_NAME}"
        if (in_cache := self.in_cache(manifest_name)) is None:
            self.fetch_split(folder)
            in_cache = self.download(manifest_name)
        return str(Path(in_cache).parent)

    def fetch_split(self, folder: str) -> None:
        """Fetch all files of a split except the manifest."""
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
                f"a complete split that prepare_tfrecord_shards.py --push-to-hub pushed: hub:{self.repo_id}/FOLDER."
            )
        shards = self.read_manifest(manifest_name).shards
        num_bytes = sum(shard.num_bytes for shard in shards if self.in_cache(f"{folder}/{shard.name}") is None)
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        num_free_bytes = shutil.disk_usage(cache).free
        if num_bytes > num_free_bytes:
            raise InputError(
                f"{self.path} needs {num_bytes / 1e9:,.1f} GB in {cache}, but only {num_free_bytes / 1e9:,.1f} GB are "
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
        """Read the manifest without adding it to the cache."""
        repository = HubRepository(self.repo_id, "dataset")
        text = _repeat(lambda: read_file(huggingface_hub.HfApi(), repository, self.commit, name))
        return parse_manifest(text, f"{name} of {self.path}")

    def fetch_shard(self, folder: str, shard: ShardRecord) -> ShardRecord:
        copy = Path(self.download(f"{folder}/{shard.name}"))
        if f"{google_crc32c.value(copy.read_bytes()):08x}" != shard.crc32c:
            copy.resolve().unlink()
            raise InputError(
                f"{self.path}: {folder}/{shard.name} does not have the checksum in the manifest. Run the command "
                "again. If it still fails, push the shards again."
            )
        return shard

    def find(self, name: str) -> str | None:
        """Fetch a file and return its path in the cache; None if the commit does not have the file."""
        is_known_missing = not isinstance(self._look_up(name), str | None)
        try:
            return None if is_known_missing else self.download(name)
        except errors.EntryNotFoundError:
            return None

    def download(self, name: str) -> str:
        """Fetch a file unless it is in the cache; return its path there."""

        def download() -> str:
            try:
                return huggingface_hub.hf_hub_download(self.repo_id, name, repo_type="dataset", revision=self.commit)
            except errors.LocalEntryNotFoundError as error:  # the Hub did not answer
                raise error.__cause__ or error from None

        return _repeat(download)

    def in_cache(self, name: str) -> str | None:
        path = self._look_up(name)
        return path if isinstance(path, str) else None

    def _look_up(self, name: str) -> object:
        return huggingface_hub.try_to_load_from_cache(self.repo_id, name, revision=self.commit, repo_type="dataset")
