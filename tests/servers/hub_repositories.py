"""Accounts and repositories as the Hugging Face Hub keeps them: commits of files, the large ones through LFS."""

import dataclasses
import fnmatch
import hashlib
import itertools
from typing import Any

from tests.servers.loopback import HttpError

DATE = "2024-01-01T00:00:00.000Z"
MAIN = "main"
LFS_PATTERNS = ("*.bin", "*.gz", "*.h5", "*.model", "*.msgpack", "*.npz", "*.parquet", "*.safetensors", "*tfevents*")
MAX_REGULAR_BYTES = 10 << 20


@dataclasses.dataclass(frozen=True)
class Account:
    """Who a token stands for; `role` is the token's: read, write, or fineGrained with the `writable` names only."""

    user: str
    role: str
    organizations: dict[str, str] = dataclasses.field(default_factory=dict)
    writable: tuple[str, ...] = ()

    def may_write(self, repo_id: str) -> bool:
        namespace = repo_id.partition("/")[0]
        if self.role == "fineGrained":
            return namespace in self.writable or repo_id in self.writable
        member_role = "admin" if namespace == self.user else self.organizations.get(namespace, "none")
        return self.role == "write" and member_role in ("write", "admin")

    def may_read_private(self, repo_id: str) -> bool:
        return repo_id.partition("/")[0] in (self.user, *self.organizations)


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a commit; the Hub names a small one by git's blob id, an LFS one by its SHA-256 too."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        blob = pointer.encode() if self.is_lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.is_lfs else self.git_oid


@dataclasses.dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    files: dict[str, HubFile]


@dataclasses.dataclass
class Repository:
    """A repository; the commits of each branch are in order, the newest last."""

    repo_id: str
    private: bool
    branches: dict[str, list[Commit]] = dataclasses.field(default_factory=lambda: {MAIN: []})
    tags: dict[str, Commit] = dataclasses.field(default_factory=dict)

    def branch(self, name: str) -> list[Commit]:
        if name not in self.branches:
            self.at(name)
            raise HttpError(400, "", f"{name} is not a branch")
        return self.branches[name]

    def at(self, revision: str) -> Commit:
        newest = {name: commits[-1] for name, commits in self.branches.items()}
        named = self.tags | newest | {commit.sha: commit for branch in self.branches.values() for commit in branch}
        if revision not in named:
            raise HttpError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return named[revision]

    def add_branch(self, name: str, start: str) -> None:
        if name in self.branches:
            raise HttpError(409, "", f"Reference already exists: {name}")
        self.branches[name] = [self.at(start)]

    def add_tag(self, name: str, revision: str) -> None:
        if name in self.tags:
            raise HttpError(409, "", f"Tag reference exists already: {name}")
        self.tags[name] = self.at(revision)


class Repositories:
    """All repositories by kind (`models`, `datasets`) and id, and the LFS objects that were uploaded."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], Repository] = {}
        self.lfs_objects: dict[str, bytes] = {}
        self._numbers = itertools.count()

    def create(self, kind: str, repo_id: str, private: bool) -> Repository:
        repository = Repository(repo_id, private)
        self.by_name[kind, repo_id] = repository
        attributes = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS)
        self.commit(repository, "initial commit", {".gitattributes": HubFile(attributes.encode(), False)})
        return repository

    def commit(self, repository: Repository, title: str, files: dict[str, HubFile], branch: str = MAIN) -> Commit:
        sha = hashlib.sha1(f"{repository.repo_id} {next(self._numbers)}".encode()).hexdigest()
        repository.branch(branch).append(Commit(sha, title, files))
        return repository.branch(branch)[-1]


def is_lfs_path(path: str, num_bytes: int) -> bool:
    return num_bytes > MAX_REGULAR_BYTES or any(fnmatch.fnmatch(path, pattern) for pattern in LFS_PATTERNS)


def describe_file(path: str, file: HubFile) -> dict[str, Any]:
    """Describe a file as a listing shows it."""
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": file.git_oid, "size": len(file.content)}
    if file.is_lfs:
        entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 134}
    return entry


def describe_folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
