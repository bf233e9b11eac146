"""Check before the expensive part of a run whether its push to the Hugging Face Hub can succeed."""

import re
from typing import TYPE_CHECKING, Any

from mlm_common.errors import InputError
from mlm_common.hub.push import HubRepository, read_branch, start_of_branch
from mlm_common.hub.retries import configure_sessions, hub_error, one_line, repeat, status_of
from mlm_common.retry import growing_delays

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CHECK_RETRY_DELAYS_SECONDS = growing_delays(1.0, 2)
REF_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")


def check_hub_access(repository: HubRepository, *, card: str | None = None) -> None:
    """Check that a later push to the repository, which need not exist, may succeed.

    Args:
        repository: where the push will go.
        card: a README.md, whose metadata the Hub must accept.

    Raises:
        InputError: a malformed id or name; no token, or one that is not valid or may not write there; the endpoint is
            no Hub; the repository must be private and is public; the branch is a tag; the tag exists already; the
            branch has files of others; the Hub refuses the card's metadata.
        HubAwayError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token

    repo_id = repository.repo_id
    _check_names(repository)
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"Pushing to {repo_id} needs the Hub; unset HF_HUB_OFFLINE, which forbids to reach it.")
    if not get_token():
        raise InputError(f"Pushing to {repo_id} needs a Hub token; log in with `hf auth login`, or set HF_TOKEN.")
    configure_sessions()
    api = HfApi()
    try:
        _check_may_write(repeat(api.whoami, CHECK_RETRY_DELAYS_SECONDS), repo_id)
        if card is not None:
            _check_card(api, card, repository)
        _check_existing(api, repository)
    except OSError as error:
        if status_of(error) == 401:
            raise InputError(
                f"Pushing to {repo_id} needs a valid Hub token; {api.endpoint} refused this one. Log in again with "
                "`hf auth login`, or set HF_TOKEN (it wins over the login)."
            ) from error
        message = (
            f"Pushing to {repo_id} needs the Hub, and {api.endpoint} does not serve it (HF_ENDPOINT names another): "
        )
        raise hub_error(message + one_line(error), error) from error


def _check_names(repository: HubRepository) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    repo_id = repository.repo_id
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(f"A Hub repository must be NAMESPACE/NAME; received {repo_id!r}. {error}") from error
    if "/" not in repo_id:
        raise InputError(f"A Hub repository must be NAMESPACE/NAME; received {repo_id!r}.")
    for flag, name in (("--hub-revision", repository.branch), ("--hub-tag", repository.tag)):
        if name is not None and not REF_NAME.fullmatch(name):
            raise InputError(f"{flag} must be a name of letters, digits, and . _ / -; received {name!r}.")


def _check_may_write(account: dict[str, Any], repo_id: str) -> None:
    """Raise InputError unless the account and its token may write to the repository, as far as the Hub tells."""
    namespace = repo_id.partition("/")[0]
    roles = {organization["name"]: organization.get("roleInOrg") for organization in account.get("orgs", ())}
    roles[account["name"]] = "admin"
    if roles.get(namespace, "read") == "read":
        writable = ", ".join(sorted(name for name, role in roles.items() if role != "read"))
        raise InputError(f"{account['name']} may not write to {namespace} on the Hub, only to {writable}.")
    token = account.get("auth", {}).get("accessToken", {})
    may_write = token.get("role") != "read"
    scopes = token.get("fineGrained", {}).get("scoped")
    if scopes is not None:
        writable_names = {scope["entity"].get("name") for scope in scopes if "repo.write" in scope["permissions"]}
        may_write = bool({namespace, repo_id} & writable_names)
    if not may_write:
        raise InputError(
            f"Pushing to {repo_id} needs a Hub token that may write there; this one's role is {token['role']!r}. Make "
            "one with the role 'write' at https://huggingface.co/settings/tokens, and log in with `hf auth login`."
        )


def _check_card(api: "HfApi", card: str, repository: HubRepository) -> None:
    """Let the Hub validate the metadata, as it does before each push: there, a refusal would come after the run."""
    try:
        repeat(lambda: api._validate_yaml(card, repo_type=repository.kind), CHECK_RETRY_DELAYS_SECONDS)
    except ValueError as error:
        if isinstance(error, OSError):  # an answer that is not the Hub's
            raise
        raise InputError(
            f"The Hub must accept the card's metadata (--hub-license, --hub-language); it says: {one_line(error)}"
        ) from error


def _check_existing(api: "HfApi", repository: HubRepository) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    repo_id = repository.repo_id
    try:
        is_private = repeat(lambda: api.repo_info(**repository.address), CHECK_RETRY_DELAYS_SECONDS).private
        refs = repeat(lambda: api.list_repo_refs(**repository.address), CHECK_RETRY_DELAYS_SECONDS)
    except RepositoryNotFoundError:
        return  # the push will create it
    if repository.private and not is_private:
        raise InputError(f"--hub-private needs a private repository; {repo_id} exists and is public.")
    tags = {tag.name for tag in refs.tags}
    if repository.branch in tags:
        raise InputError(f"--hub-revision must be a branch; {repository.branch} is a tag of {repo_id}, which is fixed.")
    if repository.tag in tags:
        raise InputError(f"--hub-tag must be new; {repo_id} has {repository.tag} already, and a tag is fixed.")
    start = repeat(lambda: start_of_branch(api, repository), CHECK_RETRY_DELAYS_SECONDS)
    repeat(lambda: read_branch(api, repository, start), CHECK_RETRY_DELAYS_SECONDS)
