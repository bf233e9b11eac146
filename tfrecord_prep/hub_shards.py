"""Shards on the Hub, `hub:NAMESPACE/NAME[/FOLDER][@REVISION]`: copied to huggingface_hub's cache, and checked there.

A revision is resolved to its commit once, so that all folders, and later starts of a run, are of one state of the
repository. The manifest of a folder is put into the cache last: with it, all is there, and the Hub is not asked again.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import google_crc32c
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import disable_progress_bars

from mlm_common.cli.console import progress_bar
from mlm_common.errors import InputError
from mlm_common.hub import push as hub
from mlm_common.hub.redaction import redacted_hash
from mlm_common.hub.retries import configure_sessions, hub_error, one_line, repeat
from mlm_common.mixture import HUB_PREFIX, MIXTURE_NAME, read_mixture
from tfrecord_prep.manifest import (
    MANIFEST_NAME,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    parse_manifest,
)

Split = Literal["train", "validation"]

ADDRESS = re.compile(rf"{HUB_PREFIX}({hub.REPO_ID.pattern})(?:/([\w./-]*\w))?(?:@({hub.REF_NAME.pattern}))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
NUM_DOWNLOADS = 8


@dataclass(frozen=True)
class HubShards:
    """Fetches folders of shards; `commits` are those of `NAMESPACE/NAME@REVISION`, known before or found here.

    Of the record of a run on the Hub these names are known by `redacted_hash` alone.
    """

    commits: dict[str, str] = field(default_factory=dict)

    def local_folder(self, path: str, split: Split) -> str:
        """Return the folder in the cache with the shards at an address, all of them fetched; other paths as they are.

        Without FOLDER that is the folder `split` of the repository or, where it has a `mixture.json`, a folder with
        that file and the folders of this split of its sources.

        Raises:
            InputError: a malformed address; no such repository, revision or folder of shards; a shard that is not that
                of the manifest; too little room on the disk.
            HubAwayError: the Hub cannot be reached, and something is not in the cache.
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
            listed = repeat(
                lambda: list(
                    api.list_repo_tree(self.repo_id, folder, recursive=True, revision=self.commit, repo_type="dataset")
                ),
                hub.RETRY_DELAYS_SECONDS,
            )
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
        repository = hub.HubRepository(self.repo_id, "dataset")
        text = repeat(
            lambda: hub.read_file(huggingface_hub.HfApi(), repository, self.commit, name), hub.RETRY_DELAYS_SECONDS
        )
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
        if self.is_known_missing(name):
            return None
        try:
            return self.download(name)
        except errors.EntryNotFoundError:
            return None

    def download(self, name: str) -> str:
        """Fetch a file unless it is in the cache, and return its path there."""

        def download() -> str:
            try:
                return huggingface_hub.hf_hub_download(self.repo_id, name, repo_type="dataset", revision=self.commit)
            except errors.LocalEntryNotFoundError as error:  # the Hub did not answer
                raise error.__cause__ or error from None

        return repeat(download, hub.RETRY_DELAYS_SECONDS)

    def in_cache(self, name: str) -> str | None:
        found = self._look_up(name)
        return found if isinstance(found, str) else None

    def is_known_missing(self, name: str) -> bool:
        return self._look_up(name) is huggingface_hub._CACHED_NO_EXIST

    def _look_up(self, name: str) -> object:
        return huggingface_hub.try_to_load_from_cache(self.repo_id, name, revision=self.commit, repo_type="dataset")
