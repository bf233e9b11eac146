"""Pushing a folder to the Hugging Face Hub.

A whole push is repeated when one of its requests fails. That is safe: one whose answer was lost finds its files
unchanged and commits nothing.
"""

import logging
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlm_common.errors import RunFailedError
from mlm_common.hub.retries import Interruption, configure_sessions, one_line, repeat
from mlm_common.retry import growing_delays
from mlm_common.storage import PARTIAL_SUFFIX, open_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

MAIN_BRANCH = "main"
# Before each further try; together more than eight minutes.
RETRY_DELAYS_SECONDS = growing_delays(2.0, 8)
# What killed writes leave behind.
IGNORED_FILES = [f"*{PARTIAL_SUFFIX}", f"*{PARTIAL_SUFFIX}/*"]


class HubPushError(RunFailedError):
    """A push that did not succeed: the message names the folder, which is kept, and how to push it by hand."""


@dataclass(frozen=True)
class HubRepository:
    """Where on the Hub a folder goes.

    repo_id: `NAMESPACE/NAME`; the repository is made when missing.
    kind: what it holds.
    private: whether one that is made is private; one that exists stays as it is.
    branch: made from the main branch when missing.
    tag: what the commit of the last push is to be called, if anything.
    """

    repo_id: str
    kind: Literal["model", "dataset"] = "model"
    private: bool = False
    branch: str = MAIN_BRANCH
    tag: str | None = None

    def command_by_hand(self, folder: str) -> str:
        """Write the shell command that pushes a folder, local or `gs://`, as `push_folder` does."""
        lines = []
        if not open_folder(folder).is_local:
            local_folder = folder.rstrip("/").rpartition("/")[2]
            lines.append(["gcloud", "storage", "cp", "--recursive", folder, "."])
            folder = local_folder
        kind = ["--repo-type", self.kind] if self.kind != "model" else []
        branch = ["--revision", self.branch] if self.branch != MAIN_BRANCH else []
        private = ["--private"] if self.private else []
        lines.append(["hf", "upload", self.repo_id, folder, ".", *kind, *branch, *private])
        return " && ".join(shlex.join(line) for line in lines)


def push_folder(
    folder: str,
    repository: HubRepository,
    *,
    commit_message: str,
    kept_in: str | None = None,
    delete_patterns: list[str] | None = None,
    interruption: Interruption | None = None,
) -> str:
    """Push all files of a local folder in one commit, and return the commit's URL.

    Where nothing has changed no commit is made, and the URL is that of the newest one. Other files of the repository
    stay. A call that fails for a passing reason is repeated, for eight minutes.

    Args:
        folder: the local folder; it is never changed.
        repository: where it goes.
        commit_message: the commit's title.
        kept_in: the folder, local or `gs://`, that holds the files when the push has failed; by default `folder`.
        delete_patterns: of files there that are deleted, unless the folder has them.
        interruption: by which another thread ends the push sooner.

    Raises:
        HubPushError: it did not succeed.
    """
    from huggingface_hub import HfApi

    configure_sessions(interruption)
    api = HfApi()

    def push() -> str:
        ensure_repository(api, repository)
        commit = api.upload_folder(
            repo_id=repository.repo_id,
            repo_type=repository.kind,
            revision=repository.branch,
            folder_path=folder,
            commit_message=commit_message,
            ignore_patterns=IGNORED_FILES,
            delete_patterns=delete_patterns,
        )
        if repository.tag is not None:
            target: dict[str, Any] = {"repo_id": repository.repo_id, "repo_type": repository.kind}
            # The id of the commit, since the branch may have moved on.
            api.create_tag(**target, tag=repository.tag, revision=commit.oid, exist_ok=True)
        return str(commit.commit_url)

    try:
        url = repeat(push, RETRY_DELAYS_SECONDS, interruption)
    except (OSError, RuntimeError, ValueError) as error:
        raise failed_push(repository, kept_in or folder, error) from error
    logger.info("pushed to %s", url)
    return url


def failed_push(repository: HubRepository, kept_in: str, error: Exception) -> HubPushError:
    """Make the error that names what happened, where the files are kept, and the command that pushes them."""
    return HubPushError(
        f"The push to {repository.repo_id} failed: {one_line(error)} "
        f"The files are kept in {kept_in}; push them by hand: {repository.command_by_hand(kept_in)}"
    )


def ensure_repository(api: "HfApi", repository: HubRepository) -> None:
    """Make the repository and its branch where they are missing."""
    target: dict[str, Any] = {"repo_id": repository.repo_id, "repo_type": repository.kind}
    api.create_repo(**target, private=repository.private, exist_ok=True)
    if repository.branch != MAIN_BRANCH:
        api.create_branch(**target, branch=repository.branch, exist_ok=True)
