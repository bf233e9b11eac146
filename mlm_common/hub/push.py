"""Push files to the Hugging Face Hub, into repositories that are new or were made by this project.

A whole push is repeated when one of its requests fails. That is safe: one whose answer was lost finds its files
unchanged and commits nothing.
"""

import hashlib
import logging
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlm_common.errors import InputError, RunFailedError
from mlm_common.hub.retries import Interruption, configure_sessions, one_line, repeat
from mlm_common.retry import growing_delays
from mlm_common.storage import open_folder

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

logger = logging.getLogger(__name__)

MAIN_BRANCH = "main"
# Before each further try; together more than eight minutes.
RETRY_DELAYS_SECONDS = growing_delays(2.0, 8)

CARD_NAME = "README.md"
# By these a branch is known as this project's: its card, a tokenizer's record, the record of a run with checkpoints.
MARKS = {CARD_NAME: "generated_by: mlm-pretraining", "training.json": '"tokenizer_sha256"', "run.json": '"fingerprint"'}
CHECKSUM_LINE = re.compile(rf"^{MARKS[CARD_NAME]}, checksum \w+\n", re.MULTILINE)
# What the Hub puts into a new repository: attributes, and a card of metadata alone, or of nothing.
ATTRIBUTES_NAME = ".gitattributes"
DEFAULT_CARD = re.compile(r"\s*(---\n((?!---).*\n)*---\s*)?")
NUM_SHOWN = 3


class HubPushError(RunFailedError):
    """A push that did not succeed: the message names the folder, which is kept, and how to push it again."""


@dataclass(frozen=True)
class HubRepository:
    """Where on the Hub files go.

    repo_id: `NAMESPACE/NAME`; the repository is created when missing.
    kind: what it holds.
    private: whether it is created as private; an existing one stays as it is.
    branch: created when missing, without the files of the main branch.
    tag: name for the commit of the last push, if any.
    """

    repo_id: str
    kind: Literal["model", "dataset"] = "model"
    private: bool = False
    branch: str = MAIN_BRANCH
    tag: str | None = None

    @property
    def address(self) -> dict[str, Any]:
        """The repository, as huggingface_hub calls it."""
        return {"repo_id": self.repo_id, "repo_type": self.kind}

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


@dataclass(frozen=True)
class Branch:
    """A branch that may be pushed to: the id of its newest commit, the paths of its files, and its card."""

    commit: str
    paths: frozenset[str]
    card: str


def push_files(
    files: Mapping[str, Path | bytes],
    repository: HubRepository,
    *,
    commit_message: str,
    kept_in: str,
    stale: str | None = None,
    interruption: Interruption | None = None,
) -> str:
    """Push files in one commit, and return its URL.

    Where nothing has changed no commit is made, and the URL is that of the newest one. Other files of the repository
    stay. A call that fails for a transient reason is repeated, for eight minutes.

    Args:
        files: {path in the repository: local file, or content}.
        repository: where they go.
        commit_message: the commit's title.
        kept_in: the folder, local or `gs://`, that holds the files when the push has failed.
        stale: pattern of the paths that are deleted unless they are among the files.
        interruption: by which another thread ends the push sooner.

    Raises:
        HubPushError: it did not succeed, or the repository is not of this project.
    """
    from huggingface_hub import HfApi

    configure_sessions(interruption)
    api = HfApi()

    def push() -> str:
        commit = commit_to_branch(api, repository, commit_message, files=files, stale=stale)
        if repository.tag is not None:
            # By the id of the commit, since the branch may have moved.
            api.create_tag(**repository.address, revision=commit.oid, tag=repository.tag, exist_ok=True)
        return str(commit.commit_url)

    try:
        url = repeat(push, RETRY_DELAYS_SECONDS, interruption)
    except (OSError, RuntimeError, ValueError) as error:
        is_as_kept = all(isinstance(content, Path) for content in files.values())
        raise failed_push(repository, kept_in, error, sorted(files) if is_as_kept else None) from error
    logger.info("pushed to %s", url)
    return url


def commit_to_branch(
    api: "HfApi",
    repository: HubRepository,
    message: str,
    *,
    files: Mapping[str, Path | bytes] | None = None,
    stale: str | None = None,
    kept: Collection[str] = (),
) -> "CommitInfo":
    """Make one commit in a repository of this project, which is created when missing.

    A card that was edited on the Hub stays as it is; a license that it names is kept where the new one names none.

    Args:
        api: of the Hub.
        repository: where the commit goes.
        message: its title.
        files: {path in the repository: local file, or content} to add or replace.
        stale: pattern of the paths that are deleted unless they are among `files` or `kept`.
        kept: paths that stay.

    Raises:
        InputError: the repository has files of others.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    files = dict(files or {})
    branch = open_branch(api, repository)
    if CARD_NAME in files:
        if DEFAULT_CARD.fullmatch(branch.card) or is_unedited(branch.card):
            files[CARD_NAME] = mark_card(_with_license(_text(files[CARD_NAME]), branch.card)).encode()
        else:
            logger.warning("the %s on the Hub was edited there, so it stays as it is", CARD_NAME)
            del files[CARD_NAME]
    others = sorted(branch.paths - files.keys() - set(kept))
    deleted = [path for path in others if stale and re.fullmatch(stale, path)]
    return api.create_commit(
        operations=[
            *(CommitOperationAdd(path, content) for path, content in files.items()),
            *map(CommitOperationDelete, deleted),
        ],
        commit_message=message,
        revision=repository.branch,
        # A card that is edited at this moment makes the commit fail; the next try sees the edit.
        parent_commit=branch.commit,
        **repository.address,
    )


def failed_push(
    repository: HubRepository, kept_in: str, error: Exception, names: list[str] | None = None
) -> HubPushError:
    """Make the error that says what happened, where the files are kept, and how they are pushed again.

    Args:
        repository: of the push.
        kept_in: the folder with the files.
        error: what happened.
        names: of the files in the folder, where these are what was pushed: a command can push them by hand.
    """
    hint = f"push them by hand: {repository.command_by_hand(kept_in, names)}" if names else "run the same command again"
    return HubPushError(
        f"The push to {repository.repo_id} failed: {one_line(error)} The files are kept in {kept_in}; {hint}"
    )


def open_branch(api: "HfApi", repository: HubRepository) -> Branch:
    """Create the repository and its branch where they are missing, and read the branch.

    Raises:
        InputError: it has files of others.
    """
    api.create_repo(**repository.address, private=repository.private, exist_ok=True)
    start = start_of_branch(api, repository)
    if start != repository.branch:
        api.create_branch(**repository.address, branch=repository.branch, revision=start, exist_ok=True)
    return read_branch(api, repository, repository.branch)


def start_of_branch(api: "HfApi", repository: HubRepository) -> str:
    """Return the branch if it exists, else the commit that it will start with, the first of the repository."""
    if repository.branch == MAIN_BRANCH:
        return MAIN_BRANCH
    if repository.branch in {branch.name for branch in api.list_repo_refs(**repository.address).branches}:
        return repository.branch
    return api.list_repo_commits(**repository.address)[-1].commit_id


def read_branch(api: "HfApi", repository: HubRepository, revision: str) -> Branch:
    """Read what a branch, or a commit, has, and check that it may be pushed to.

    It may if it is as the Hub makes a new one, or has one of the `MARKS`; others may have added files since.

    Raises:
        InputError: it has files or a card, and no mark.
    """
    from huggingface_hub.hf_api import RepoFile

    commit = str(api.repo_info(**repository.address, revision=revision).sha)
    entries = api.list_repo_tree(**repository.address, revision=commit, recursive=True)
    paths = frozenset(entry.path for entry in entries if isinstance(entry, RepoFile))
    marked = {path: read_file(api, repository, commit, path) for path in MARKS.keys() & paths}
    card = marked.get(CARD_NAME, "")
    if not any(MARKS[path] in text for path, text in marked.items()):
        others = sorted(paths - {ATTRIBUTES_NAME} - ({CARD_NAME} if DEFAULT_CARD.fullmatch(card) else set()))
        if others:
            shown = ", ".join(others[:NUM_SHOWN])
            if len(others) > NUM_SHOWN:
                shown += f" and {len(others) - NUM_SHOWN:,} more"
            raise InputError(
                f"Repository {repository.repo_id} already contains files that this tool did not create ({shown}). "
                "Name another repository, or with --hub-revision a branch: a new one starts without files. If it is "
                f"yours, add the line `{MARKS[CARD_NAME]}` to the metadata of its {CARD_NAME}."
            )
    return Branch(commit, paths, card)


def read_file(api: "HfApi", repository: HubRepository, revision: str, path: str) -> str:
    """Download a small text file, past the cache of huggingface_hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url = hf_hub_url(repository.repo_id, path, repo_type=repository.kind, revision=revision, endpoint=api.endpoint)
    answer = get_session().get(url, headers=api._build_hf_headers())
    hf_raise_for_status(answer)
    return answer.content.decode("utf-8", errors="replace")


def mark_card(card: str) -> str:
    """Return a card with a line in its metadata that says which project wrote it, and the checksum of the rest.

    Later pushes know by it that the repository is theirs, and that nobody has edited the card.
    """
    rest = CHECKSUM_LINE.sub("", card)
    checksum = hashlib.sha256(rest.encode()).hexdigest()[:16]
    return rest.replace("\n---\n", f"\n{MARKS[CARD_NAME]}, checksum {checksum}\n---\n", 1)


def is_unedited(card: str) -> bool:
    """Return whether a card is as `mark_card` made it."""
    return CHECKSUM_LINE.search(card) is not None and mark_card(card) == card


def _text(file: Path | bytes) -> str:
    return (file if isinstance(file, bytes) else file.read_bytes()).decode()


def _with_license(card: str, existing: str) -> str:
    """Give a card the license of the existing one, unless it names one."""
    if not existing.strip():
        return card
    import yaml
    from huggingface_hub import RepoCard

    old, new = (RepoCard(text, ignore_metadata_errors=True).data.to_dict() for text in (existing, card))
    kept = {name: value for name, value in old.items() if name.startswith("license")}
    if not kept or "license" in new:
        return card
    return card.replace("---\n", "---\n" + yaml.safe_dump(kept), 1)
