import pytest
from huggingface_hub import constants

from mlm_common.errors import InputError
from mlm_common.hub.access import check_hub_access
from mlm_common.hub.push import HubRepository
from mlm_common.hub.retries import HubAwayError
from tests.servers.fixtures import HubHandle

REPO = "alice/model"
REPOSITORY = HubRepository(REPO)
PRIVATE = HubRepository(REPO, private=True)


@pytest.fixture
def server(hub_here: HubHandle) -> HubHandle:
    return hub_here


@pytest.mark.parametrize(
    ("token", "repo_id", "message"),
    [
        ("", REPO, "needs a Hub token; log in with `hf auth login`"),
        ("hf_unknown", REPO, "refused this one"),
        (HubHandle.read_token, REPO, "role is 'read'"),
        (HubHandle.fine_grained_token, REPO, "role is 'fineGrained'"),
        (HubHandle.fine_grained_token, "alice/allowed", ""),
        (HubHandle.write_token, REPO, ""),
        (HubHandle.write_token, "lab/model", ""),
        (HubHandle.write_token, "library/model", "may not write to library on the Hub, only to alice, lab"),
        (HubHandle.write_token, "bob/model", "may not write to bob"),
        (HubHandle.write_token, "model", "must be NAMESPACE/NAME"),
        (HubHandle.write_token, "alice/a model", "must be NAMESPACE/NAME"),
    ],
)
def test_access_check(
    server: HubHandle, monkeypatch: pytest.MonkeyPatch, token: str, repo_id: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    if message:
        with pytest.raises(InputError, match=message):
            check_hub_access(HubRepository(repo_id))
    else:
        check_hub_access(HubRepository(repo_id))
    assert not server.requests("POST")


def test_access_check_of_private_repositories(server: HubHandle) -> None:
    check_hub_access(PRIVATE)
    server.put(REPO, "README.md", b"---\nlicense: mit\n---\n")
    check_hub_access(REPOSITORY)
    with pytest.raises(InputError, match="exists and is public"):
        check_hub_access(PRIVATE)


def test_access_check_without_a_hub(server: HubHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    server.fault("whoami")
    check_hub_access(REPOSITORY)
    server.fault("whoami", times=2)
    with pytest.raises(HubAwayError, match=r"does not serve it.*503"):
        check_hub_access(REPOSITORY)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubAwayError, match=r"127\.0\.0\.1:9 does not serve it"):
        check_hub_access(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        check_hub_access(REPOSITORY)
