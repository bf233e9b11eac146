"""Pushing files to the Hugging Face Hub.

A whole push is repeated when one of its requests fails. That is safe: one whose answer was lost finds its files
unchanged and commits nothing.
"""

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlm_common.errors import RunFailedError
from mlm_common.hub.own_files import FormerPush, OwnFiles, read_own_files
from mlm_common.hub.retries import Interruption, configure_sessions, one_line, repeat
from mlm_common.retry import growing_delays
from mlm_common.storage import open_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

MAIN_BRANCH = "main"
# Before each further try; together more than eight minutes.
RETRY_DELAYS_SECONDS = growing_delays(2.0, 8)


class HubPushError(RunFailedError):
    """A push that did not succeed: the message names the folder, which is kept, and how to push it again."""


@dataclass(frozen=True)
class HubRepository:
    """Where on the Hub files go.

    repo_id: `NAMESPACE/NAME`; the repository is made when missing.
    kind: what it holds.
    private: whether one that is made is private; one that exists stays as it is.
    branch: made when missing, without the files of the main branch.
    tag: what the commit of the last push is to be called, if anything.
    former: how pushes of former versions are known there.
    """

    repo_id: str
    kind: Literal["model", "dataset"] = "model"
    private: bool = False
    branch: str = MAIN_BRANCH
    tag: str | None = None
    former: FormerPush | None = None

    @property
    def target(self) -> dict[str, Any]:
        """The repository and its branch, as huggingface_hub calls them."""
        return {"repo_id": self.repo_id, "repo_type": self.kind, "revision": self.branch}

    def command_by_hand(self, folder: str, names: list[str]) -> str:
        """Write the shell command that pushes files of a folder, local or `gs://`."""
        lines = []
        if not open_folder(folder).is_local:
            local_folder = folder.rstrip("/").rpartition("/")[2]
            lines.append(["gcloud", "storage", "cp", "--recursive", folder, "."])
            folder = local_folder
        kind = ["--repo-type", self.kind] if self.kind != "model" else []
        branch = ["--revision", self.branch] if self.branch != MAIN_BRANCH else []
        private = ["--private"] if self.private else []
        included = ["--include", *names]
        lines.append(["hf", "upload", self.repo_id, folder, ".", *kind, *branch, *private, *included])
        return " && ".join(shlex.join(line) for line in lines)


def push_files(
    files: Mapping[str, Path | bytes],
    repository: HubRepository,
    *,
    commit_message: str,
    kept_in: str,
    replaced: str | None = None,
    interruption: Interruption | None = None,
) -> str:
    """Push files in one commit, with a listing of all that was ever pushed there, and return the commit's URL.

    Where nothing has changed no commit is made, and the URL is that of the newest one. Other files of the repository
    stay. A call that fails for a passing reason is repeated, for eight minutes.

    Args:
        files: {path in the repository: local file, or content}.
        repository: where they go.
        commit_message: the commit's title.
        kept_in: the folder, local or `gs://`, that holds the files when the push has failed.
        replaced: what the paths of files begin with that earlier pushes sent and that are deleted.
        interruption: by which another thread ends the push sooner.

    Raises:
        HubPushError: it did not succeed, or files are there that are not ours.
    """
    from huggingface_hub import HfApi

    configure_sessions(interruption)
    api = HfApi()

    def push() -> str:
        own = open_repository(api, repository)
        deleted = {path for path in own.listed - files.keys() if replaced and path.startswith(replaced)}
        operations = own.operations(files, deleted=deleted)
        commit = api.create_commit(operations=operations, commit_message=commit_message, **repository.target)
        if repository.tag is not None:
            # The id of the commit, since the branch may have moved on.
            target = repository.target | {"revision": commit.oid}
            api.create_tag(**target, tag=repository.tag, exist_ok=True)
        return str(commit.commit_url)

    try:
        url = repeat(push, RETRY_DELAYS_SECONDS, interruption)
    except (OSError, RuntimeError, ValueError) as error:
        is_as_kept = all(isinstance(content, Path) for content in files.values())
        raise failed_push(repository, kept_in, error, sorted(files) if is_as_kept else None) from error
    logger.info("pushed to %s", url)
    return url


def failed_push(
    repository: HubRepository, kept_in: str, error: Exception, names: list[str] | None = None
) -> HubPushError:
    """Make the error that names what happened, where the files are kept, and how they are pushed again.

    Args:
        repository: of the push.
        kept_in: the folder with the files.
        error: what happened.
        names: of the files in the folder, where these are what was pushed: a command can push them by hand.
    """
    cure = f"push them by hand: {repository.command_by_hand(kept_in, names)}" if names else "run the same command again"
    return HubPushError(
        f"The push to {repository.repo_id} failed: {one_line(error)} The files are kept in {kept_in}; {cure}"
    )


def open_repository(api: "HfApi", repository: HubRepository) -> OwnFiles:
    """Make the repository and its branch where they are missing, and read what is ours there.

    Raises:
        InputError: the files there are not ours.
    """
    where: dict[str, Any] = {"repo_id": repository.repo_id, "repo_type": repository.kind}
    api.create_repo(**where, private=repository.private, exist_ok=True)
    start = start_of_branch(api, repository)
    if start != repository.branch:
        api.create_branch(**where, branch=repository.branch, revision=start, exist_ok=True)
    return read_own_files(api, repository.target, repository.former)


def start_of_branch(api: "HfApi", repository: HubRepository) -> str:
    """Find the commit that the branch begins with, which is the repository's first; the branch, where it is there."""
    where: dict[str, Any] = {"repo_id": repository.repo_id, "repo_type": repository.kind}
    if repository.branch == MAIN_BRANCH:
        return MAIN_BRANCH
    if repository.branch in {branch.name for branch in api.list_repo_refs(**where).branches}:
        return repository.branch
    return api.list_repo_commits(**where)[-1].commit_id
