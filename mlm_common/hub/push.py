"""Push files to the Hugging Face Hub, into repositories that are new or were made by this project.

`check_hub_access` finds out before the expensive part of a run whether its push can succeed. A whole push is repeated
when one of its requests fails. That is safe: one whose answer was lost finds its files unchanged and commits nothing.
"""

import hashlib
import logging
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import huggingface_hub as hf  # imports its parts when they are used
from huggingface_hub import constants

from mlm_common.errors import InputError, RunFailedError, growing_delays
from mlm_common.hub.retries import check_token, configure_sessions, hub_error, one_line, repeat, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

logger = logging.getLogger(__name__)

MAIN_BRANCH = "main"
REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
REF_NAME = re.compile(r"\w[\w./-]*", re.ASCII)
# Before each further try of a push; together more than eight minutes.
RETRY_DELAYS_SECONDS = growing_delays(2.0, 8)
CHECK_RETRY_DELAYS_SECONDS = growing_delays(1.0, 2)

CARD_NAME = "README.md"
# By these a branch is known as this project's: its card, a tokenizer's record, the record of a run with checkpoints.
MARKS = {CARD_NAME: "generated_by: mlm-pretraining", "training.json": '"tokenizer_sha256"', "run.json": '"fingerprint"'}
CHECKSUM_LINE = re.compile(rf"^{MARKS[CARD_NAME]}, checksum \w+\n", re.MULTILINE)
# What the Hub puts into a new repository: attributes, and a card of metadata alone, or of nothing.
ATTRIBUTES_NAME = ".gitattributes"
DEFAULT_CARD = re.compile(r"\s*(---\n((?!---).*\n)*---\s*)?")
LICENSE_LINES = re.compile(r"^license\w*:.*\n", re.MULTILINE)
NUM_SHOWN = 3


class HubPushError(RunFailedError):
    """A push that did not succeed: the message names the folder, which is kept, and how to push it again."""


@dataclass(frozen=True)
class HubRepository:
    """Where on the Hub files go.

    repo_id: `NAMESPACE/NAME`; the repository is created when missing.
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


class Branch(NamedTuple):
    """A branch that may be pushed to: the id of its newest commit, the paths of its files, and its card."""

    commit: str
    paths: frozenset[str]
    card: str


def check_hub_access(repository: HubRepository, *, card: str | None = None) -> None:
    """Check that a later push to the repository, which need not exist, may succeed.

    Args:
        card: a README.md, whose metadata the Hub must accept.

    Raises:
        InputError: id, names, token, repository, branch, tag or card are not what a push needs.
        HubAwayError: the Hub cannot be reached.
    """
    repo_id = repository.repo_id
    if not REPO_ID.fullmatch(repo_id):
        raise InputError(f"A Hub repository must be NAMESPACE/NAME; received {repo_id!r}.")
    for flag, name in (("--hub-revision", repository.branch), ("--hub-tag", repository.tag)):
        if name is not None and not REF_NAME.fullmatch(name):
            raise InputError(f"{flag} must be a name of letters, digits, and . _ / -; received {name!r}.")
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"Pushing to {repo_id} needs the Hub; unset HF_HUB_OFFLINE, which blocks it.")
    if not hf.get_token():
        raise InputError(f"Pushing to {repo_id} needs a Hub token; log in with `hf auth login`, or set HF_TOKEN.")
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
                f"Pushing to {repo_id} needs a valid Hub token; {api.endpoint} refused this one. Log in again with "
                "`hf auth login`, or set HF_TOKEN (which overrides the login)."
            ) from error
        message = (
            f"Pushing to {repo_id} needs the Hub, and {api.endpoint} does not serve it (HF_ENDPOINT names another): "
        )
        raise hub_error(message + one_line(error), error) from error


def _check_may_write(account: Mapping[str, Any], repo_id: str) -> None:
    """Raise InputError unless the account and its token may write to the repository, as far as the Hub tells."""
    namespace = repo_id.partition("/")[0]
    roles = {one["name"]: one.get("roleInOrg", "read") for one in account.get("orgs", ())} | {account["name"]: "admin"}
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
            f"Pushing to {repo_id} needs a Hub token that may write there; this one's role is {token['role']!r}. Make "
            "one with the role 'write' at https://huggingface.co/settings/tokens, and log in with `hf auth login`."
        )


def _check_card(api: "HfApi", card: str, repository: HubRepository) -> None:
    """Let the Hub validate the metadata, as it does before each push: there, a refusal would come after the run."""
    content = {"content": card, "repoType": repository.kind}

    def validate() -> None:
        url, headers = f"{api.endpoint}/api/validate-yaml", hf.utils.build_hf_headers()
        hf.utils.hf_raise_for_status(hf.get_session().post(url, json=content, headers=headers))

    try:
        repeat(validate, CHECK_RETRY_DELAYS_SECONDS)
    except hf.errors.BadRequestError as error:
        raise InputError(
            "The Hub must accept the card's metadata (--hub-license, --hub-language); it says: "
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
        raise InputError(f"--hub-private needs a private repository; {repo_id} exists and is public.")
    refs = repeat(lambda: api.list_repo_refs(**repository.address), CHECK_RETRY_DELAYS_SECONDS)
    tags = {tag.name for tag in refs.tags}
    if repository.branch in tags:
        raise InputError(f"--hub-revision must be a branch; {repository.branch} is a tag of {repo_id}, which is fixed.")
    if repository.tag in tags:
        raise InputError(f"--hub-tag must be new; {repo_id} has {repository.tag} already, and a tag is fixed.")
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

    Where nothing has changed no commit is made, and the URL is that of the newest one. Other files of the repository
    stay. A call that fails for a transient reason is repeated, for eight minutes.

    Args:
        files: {path in the repository: local file, or content}.
        kept_in: the folder, local or `gs://`, that holds the files when the push has failed.
        stale: pattern of the paths that are deleted unless they are among the files.
        stop_retries: set by another thread, it ends the waits between tries.

    Raises:
        HubPushError: it did not succeed, or the repository is not of this project.
    """
    configure_sessions()
    api = hf.HfApi()

    def push() -> str:
        commit = commit_to_branch(api, repository, commit_message, files=files, stale=stale)
        if repository.tag is not None:
            # By the id of the commit, since the branch may have moved.
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
    """Make one commit in a repository of this project, which is created when missing.

    A card that was edited on the Hub stays as it is; a license that it names is kept where the new one names none.

    Args:
        files: {path in the repository: local file, or content} to add or replace.
        stale: pattern of the paths that are deleted unless they are among `files` or `kept`.
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
            logger.warning("the %s on the Hub was edited there, so it stays as it is", CARD_NAME)
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
        # A card that is edited at this moment makes the commit fail; the next try sees the edit.
        parent_commit=branch.commit,
        **repository.address,
    )


def failed_push(repository: HubRepository, kept_in: str, error: Exception) -> HubPushError:
    return HubPushError(
        f"The push to {repository.repo_id} failed: {one_line(error)} The files are kept in {kept_in}; run the same "
        "command again to push them."
    )


def open_branch(api: "HfApi", repository: HubRepository) -> Branch:
    """Create the repository and its branch where they are missing, and read the branch."""
    api.create_repo(**repository.address, private=repository.private, exist_ok=True)
    start = _start_of_branch(api, repository)
    if start != repository.branch:
        api.create_branch(**repository.address, branch=repository.branch, revision=start, exist_ok=True)
    return read_branch(api, repository, repository.branch)


def _start_of_branch(api: "HfApi", repository: HubRepository) -> str:
    """Return the branch if it exists, else the commit that it will start with, the first of the repository."""
    branches = {branch.name for branch in api.list_repo_refs(**repository.address).branches}
    if repository.branch in {MAIN_BRANCH, *branches}:
        return repository.branch
    return api.list_repo_commits(**repository.address)[-1].commit_id


def read_branch(api: "HfApi", repository: HubRepository, revision: str) -> Branch:
    """Read what a branch, or a commit, has, and check that it may be pushed to.

    It may if it is as the Hub makes a new one, or has one of the `MARKS`; others may have added files since.
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
                "Name another repository, or with --hub-revision a branch: a new one starts without files. If it is "
                f"yours, add the line `{MARKS[CARD_NAME]}` to the metadata of its {CARD_NAME}."
            )
    return Branch(commit, paths, card)


def read_file(api: "HfApi", repository: HubRepository, revision: str, path: str) -> str:
    """Download a small text file, past the cache of huggingface_hub."""
    url = hf.hf_hub_url(repository.repo_id, path, repo_type=repository.kind, revision=revision, endpoint=api.endpoint)
    answer = hf.get_session().get(url, headers=hf.utils.build_hf_headers())
    hf.utils.hf_raise_for_status(answer)
    return answer.content.decode("utf-8", errors="replace")


def mark_card(card: str) -> str:
    """Return a card with a line in its metadata that says which project wrote it, and the checksum of the rest.

    Later pushes know by it that the repository is theirs, and that nobody has edited the card.
    """
    rest = CHECKSUM_LINE.sub("", card)
    checksum = hashlib.sha256(rest.encode()).hexdigest()[:16]
    return rest.replace("\n---\n", f"\n{MARKS[CARD_NAME]}, checksum {checksum}\n---\n", 1)
