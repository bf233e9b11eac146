"""Push files to the Hugging Face Hub, to repositories that are new or were created by this project.

`check_hub_access` checks before the expensive part of a run whether its push can succeed. If a request fails, the whole
push is repeated. Repeating is safe: if only the answer was lost, the files are already on the Hub, and nothing is
committed again.
"""

import hashlib
import logging
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import huggingface_hub as hf  # loads its modules lazily
from huggingface_hub import constants

from mlm_common.errors import InputError, RunFailedError, growing_delays
from mlm_common.hub.retries import check_token, configure_sessions, hub_error, one_line, repeat, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

logger = logging.getLogger(__name__)

MAIN_BRANCH = "main"
REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
REF_NAME = re.compile(r"\w[\w./-]*", re.ASCII)
# Waits before the retries of a push, more than eight minutes in total.
RETRY_DELAYS_SECONDS = growing_delays(2.0, 8)
CHECK_RETRY_DELAYS_SECONDS = growing_delays(1.0, 2)

CARD_NAME = "README.md"
# {file: text}. A text in its file marks a branch as created by this project. The files are the card, the record of a
# tokenizer, and the record of a run with checkpoints.
MARKS = {CARD_NAME: "generated_by: mlm-pretraining", "training.json": '"tokenizer_sha256"', "run.json": '"fingerprint"'}
CHECKSUM_LINE = re.compile(rf"^{MARKS[CARD_NAME]}, checksum \w+\n", re.MULTILINE)
# Files that the Hub puts into a new repository: attributes, and a card that is empty or has only metadata.
ATTRIBUTES_NAME = ".gitattributes"
DEFAULT_CARD = re.compile(r"\s*(---\n((?!---).*\n)*---\s*)?")
LICENSE_LINES = re.compile(r"^license\w*:.*\n", re.MULTILINE)
NUM_SHOWN = 3


class HubPushError(RunFailedError):
    """A push failed. The message names the folder, which is kept, and says how to push it again."""


@dataclass(frozen=True)
class HubRepository:
    """Where to push on the Hub.

    Attributes:
        repo_id: `NAMESPACE/NAME`. The repository is created if it is missing.
        kind: kind of repository.
        private: whether to create the repository as private. An existing repository is not changed.
        branch: branch to push to. A missing branch is created, without the files of the main branch.
        tag: name of the tag to create for the commit; None for no tag.
    """

    repo_id: str
    kind: Literal["model", "dataset"] = "model"
    private: bool = False
    branch: str = MAIN_BRANCH
    tag: str | None = None

    @property
    def address(self) -> dict[str, Any]:
        """The arguments that name the repository in calls of huggingface_hub."""
        return {"repo_id": self.repo_id, "repo_type": self.kind}


class Branch(NamedTuple):
    """A branch that may be pushed to.

    Attributes:
        commit: id of its newest commit.
        paths: paths of its files.
        card: text of its card; empty if it has none.
    """

    commit: str
    paths: frozenset[str]
    card: str


def check_hub_access(repository: HubRepository, *, card: str | None = None) -> None:
    """Check that a later push to a repository can succeed.

    Args:
        repository: the repository, which need not exist.
        card: a README.md, whose metadata the Hub must accept; None to skip this check.

    Raises:
        InputError: the id, the names, the token, the repository, the branch, the tag or the card is invalid.
        HubAwayError: the Hub cannot be reached.
    """
    repo_id = repository.repo_id
    if not REPO_ID.fullmatch(repo_id):
        raise InputError(f"A Hub repository must be NAMESPACE/NAME; received {repo_id!r}.")
    for flag, name in (("--hub-revision", repository.branch), ("--hub-tag", repository.tag)):
        if name is not None and not REF_NAME.fullmatch(name):
            raise InputError(f"{flag} must be a name of letters, digits, and . _ / -; received {name!r}.")
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"Pushing to {repo_id} needs the Hub, but HF_HUB_OFFLINE is set. Unset it.")
    if not hf.get_token():
        raise InputError(
            f"Pushing to {repo_id} needs a Hub token; none was found. Log in with `hf auth login`, or set HF_TOKEN."
        )
    check_token()
    configure_sessions()
    api = hf.HfApi()
    try:
        _check_may_write(repeat(api.whoami, CHECK_RETRY_DELAYS_SECONDS), repo_id)
        if card is not None:
            _check_card(api, card, repository)
        _check_existing(api, repository)
    except OSError as error:
        if status_of(error) == 401:
            raise InputError(
                f"Pushing to {repo_id} needs a valid Hub token; {api.endpoint} rejected this one. Log in again with "
                "`hf auth login`, or set HF_TOKEN (which overrides the login)."
            ) from error
        message = (
            f"Pushing to {repo_id} needs the Hub, and {api.endpoint} cannot be used (HF_ENDPOINT can name another): "
        )
        raise hub_error(message + one_line(error), error) from error


def _check_may_write(account: Mapping[str, Any], repo_id: str) -> None:
    """Check that an account and its token may write to a repository, if the Hub reports their permissions.

    Args:
        account: answer of the Hub's `whoami`.
        repo_id: id of the repository.

    Raises:
        InputError: they may not write to it.
    """
    namespace = repo_id.partition("/")[0]
    roles = {org["name"]: org.get("roleInOrg", "read") for org in account.get("orgs", ())} | {account["name"]: "admin"}
    if roles.get(namespace, "read") == "read":
        writable = ", ".join(sorted(name for name, role in roles.items() if role != "read"))
        raise InputError(f"{account['name']} may not write to {namespace} on the Hub, only to {writable}.")
    token = account.get("auth", {}).get("accessToken", {})
    scopes = token.get("fineGrained", {}).get("scoped")
    may_write = token.get("role") != "read"
    if scopes is not None:
        may_write = any(
            scope["entity"].get("name") in (namespace, repo_id) and "repo.write" in scope["permissions"]
            for scope in scopes
        )
    if not may_write:
        raise InputError(
            f"Pushing to {repo_id} needs a Hub token that may write there; this token has the role {token['role']!r}. "
            "Create one with the role 'write' at https://huggingface.co/settings/tokens, and log in with "
            "`hf auth login`."
        )


def _check_card(api: "HfApi", card: str, repository: HubRepository) -> None:
    """Let the Hub validate the metadata of a card. The Hub also does this before each push, but an error at that time
    would come only after the run.

    Raises:
        InputError: the Hub rejects the metadata.
    """
    content = {"content": card, "repoType": repository.kind}

    def validate() -> None:
        url, headers = f"{api.endpoint}/api/validate-yaml", hf.utils.build_hf_headers()
        hf.utils.hf_raise_for_status(hf.get_session().post(url, json=content, headers=headers))

    try:
        repeat(validate, CHECK_RETRY_DELAYS_SECONDS)
    except hf.errors.BadRequestError as error:
        raise InputError(
            "The Hub rejects the metadata of the card (--hub-license, --hub-language): "
            f"{error.server_message or one_line(error)}"
        ) from error


def _check_existing(api: "HfApi", repository: HubRepository) -> None:
    repo_id = repository.repo_id
    try:
        is_private = repeat(lambda: api.repo_info(**repository.address), CHECK_RETRY_DELAYS_SECONDS).private
    except OSError as error:
        if status_of(error) == 404:
            return  # the push will create it
        raise
    if repository.private and not is_private:
        raise InputError(
            f"--hub-private needs a private repository; {repo_id} exists and is public. Name another repository, or "
            "make it private on the Hub."
        )
    refs = repeat(lambda: api.list_repo_refs(**repository.address), CHECK_RETRY_DELAYS_SECONDS)
    tags = {tag.name for tag in refs.tags}
    if repository.branch in tags:
        raise InputError(
            f"--hub-revision must be a branch; {repository.branch} is a tag of {repo_id}, which cannot change."
        )
    if repository.tag in tags:
        raise InputError(
            f"--hub-tag must be new; {repo_id} already has the tag {repository.tag}, which cannot change. Name another."
        )
    repeat(lambda: read_branch(api, repository, _start_of_branch(api, repository)), CHECK_RETRY_DELAYS_SECONDS)


def push_files(
    files: Mapping[str, Path | bytes],
    repository: HubRepository,
    *,
    commit_message: str,
    kept_in: str,
    stale: str | None = None,
    stop_retries: threading.Event | None = None,
) -> str:
    """Push files in one commit, and return its URL.

    If nothing has changed, no commit is made, and the URL of the newest commit is returned. Other files of the
    repository are kept. After transient errors the push is repeated for eight minutes.

    Args:
        files: {path in the repository: local file, or content}.
        repository: where to push.
        commit_message: message of the commit.
        kept_in: folder, local or `gs://`, that keeps the files if the push fails; the error names it.
        stale: pattern of paths to delete unless they are among the files.
        stop_retries: if set by another thread, ends the current wait and the retries.

    Raises:
        HubPushError: the push failed, or the repository was not created by this project.
    """
    configure_sessions()
    api = hf.HfApi()

    def push() -> str:
        commit = commit_to_branch(api, repository, commit_message, files=files, stale=stale)
        if repository.tag is not None:
            # The tag names the id of the commit, because the branch may already have newer commits.
            api.create_tag(**repository.address, revision=commit.oid, tag=repository.tag, exist_ok=True)
        return str(commit.commit_url)

    try:
        url = repeat(push, RETRY_DELAYS_SECONDS, stop_retries)
    except (OSError, RuntimeError, ValueError) as error:
        raise failed_push(repository, kept_in, error) from error
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
    """Make one commit in a repository of this project, which is created if it is missing.

    A card that was edited on the Hub is not replaced. The license of the old card is kept if the new card has none.

    Args:
        api: client of the Hub.
        repository: the repository.
        message: message of the commit.
        files: {path in the repository: local file, or content} to add or replace.
        stale: pattern of paths to delete unless they are among `files` or `kept`.
        kept: paths not to delete.

    Raises:
        InputError: the repository was not created by this project.
    """
    files = dict(files or {})
    branch = open_branch(api, repository)
    if CARD_NAME in files:
        is_marked = CHECKSUM_LINE.search(branch.card) is not None
        if DEFAULT_CARD.fullmatch(branch.card) or (is_marked and mark_card(branch.card) == branch.card):
            content = files[CARD_NAME]
            card = (content if isinstance(content, bytes) else content.read_bytes()).decode()
            if not LICENSE_LINES.search(card):
                card = card.replace("---\n", "---\n" + "".join(LICENSE_LINES.findall(branch.card)), 1)
            files[CARD_NAME] = mark_card(card).encode()
        else:
            logger.warning("the %s was edited on the Hub, so it is not replaced", CARD_NAME)
            del files[CARD_NAME]
    others = sorted(branch.paths - files.keys() - set(kept))
    deleted = [path for path in others if stale and re.fullmatch(stale, path)]
    return api.create_commit(
        operations=[
            *(hf.CommitOperationAdd(path, content) for path, content in files.items()),
            *map(hf.CommitOperationDelete, deleted),
        ],
        commit_message=message,
        revision=repository.branch,
        # If the card is edited at this moment, the commit fails, and the next attempt sees the edit.
        parent_commit=branch.commit,
        **repository.address,
    )


def failed_push(repository: HubRepository, kept_in: str, error: Exception) -> HubPushError:
    return HubPushError(
        f"The push to {repository.repo_id} failed: {one_line(error)} The files are kept in {kept_in}; run the same "
        "command again to push them."
    )


def open_branch(api: "HfApi", repository: HubRepository) -> Branch:
    """Create the repository and the branch if they are missing, and read the branch."""
    api.create_repo(**repository.address, private=repository.private, exist_ok=True)
    start = _start_of_branch(api, repository)
    if start != repository.branch:
        api.create_branch(**repository.address, branch=repository.branch, revision=start, exist_ok=True)
    return read_branch(api, repository, repository.branch)


def _start_of_branch(api: "HfApi", repository: HubRepository) -> str:
    """Return the branch if it exists, or else the commit from which to create it, the repository's first commit."""
    branches = {branch.name for branch in api.list_repo_refs(**repository.address).branches}
    if repository.branch in {MAIN_BRANCH, *branches}:
        return repository.branch
    return api.list_repo_commits(**repository.address)[-1].commit_id


def read_branch(api: "HfApi", repository: HubRepository, revision: str) -> Branch:
    """Read a branch or commit, and check that it may be pushed to.

    A push is allowed if the branch has only the files of a new repository, or has one of the `MARKS`. Other people may
    since have added files to a marked branch.

    Raises:
        InputError: the branch may not be pushed to.
    """
    commit = str(api.repo_info(**repository.address, revision=revision).sha)
    paths = frozenset(api.list_repo_files(**repository.address, revision=commit))
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
                "Name another repository, or a new branch with --hub-revision, which starts without files. If the "
                f"repository is yours, add the line `{MARKS[CARD_NAME]}` to the metadata of its {CARD_NAME}."
            )
    return Branch(commit, paths, card)


def read_file(api: "HfApi", repository: HubRepository, revision: str, path: str) -> str:
    """Download a small text file, without the cache of huggingface_hub."""
    url = hf.hf_hub_url(repository.repo_id, path, repo_type=repository.kind, revision=revision, endpoint=api.endpoint)
    answer = hf.get_session().get(url, headers=hf.utils.build_hf_headers())
    hf.utils.hf_raise_for_status(answer)
    return answer.content.decode("utf-8", errors="replace")


def mark_card(card: str) -> str:
    """Add a line to the metadata of a card. The line has this project's name and a checksum of the rest of the card.

    The line shows later pushes that this project created the repository, and whether somebody has edited the card.
    """
    unmarked = CHECKSUM_LINE.sub("", card)
    checksum = hashlib.sha256(unmarked.encode()).hexdigest()[:16]
    return unmarked.replace("\n---\n", f"\n{MARKS[CARD_NAME]}, checksum {checksum}\n---\n", 1)
