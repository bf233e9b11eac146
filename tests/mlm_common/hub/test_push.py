"""Pushes to repositories that are new, of this project, or of others, with and without faults."""

from typing import Any

import pytest
from huggingface_hub import RepoCard, constants

from mlm_common.errors import InputError
from mlm_common.hub import push as hub
from mlm_common.hub.push import HubRepository, check_hub_access, mark_card
from mlm_common.hub.retries import HubAwayError, check_token, hub_error
from tests.servers.fixtures import HubHandle

REPO = "alice/model"
REPOSITORY = HubRepository(REPO)
PRIVATE = HubRepository(REPO, private=True)
CARD = "---\ntags:\n- ours\n---\n\nmade by us\n"
NEWER_CARD = b"---\ntags: []\n---\n\nnewer\n"
FILES = {"README.md": mark_card(CARD).encode(), "weights/1": b"1", "model.safetensors": bytes(range(256)) * 40}
EDITED_CARD = FILES["README.md"] + b"Cite it.\n"
FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 503}, {"status": 429, "headers": {"Retry-After": "0"}}, {"mode": "reset"}, {"mode": "lost_answer"},
)  # fmt: skip


@pytest.fixture
def server(hub_here: HubHandle) -> HubHandle:
    return hub_here


def stored_files(server: HubHandle, branch: str = "main") -> dict[str, bytes]:
    files = server.files(REPO, revision=branch)
    return {path: content for path, content in files.items() if path != ".gitattributes"}


def titles(server: HubHandle, branch: str = "main") -> list[str]:
    repository = server.repository(REPO, revision=branch)
    assert repository
    return repository["commits"][1:]


def push(files: dict[str, bytes] = FILES, repository=REPOSITORY, title: str = "trained", **options: Any) -> str:
    return hub.push_files(files, repository, commit_message=title, kept_in="folder", **options)


@pytest.mark.parametrize(
    ("token", "repo_id", "message"),
    [
        ("", REPO, "needs a Hub token; none was found. Log in with `hf auth login`"),
        ("hf_unknown", REPO, "rejected this one"),
        (HubHandle.read_token, REPO, "the role 'read'"),
        (HubHandle.fine_grained_token, REPO, "the role 'fineGrained'"),
        (HubHandle.fine_grained_token, "alice/allowed", ""),
        (HubHandle.write_token, REPO, ""),
        (HubHandle.write_token, "lab/model", ""),
        (HubHandle.write_token, "library/model", "may not write to library on the Hub, only to alice, lab"),
        (HubHandle.write_token, "bob/model", "may not write to bob"),
        (HubHandle.write_token, "model", "must be NAMESPACE/NAME"),
        (HubHandle.write_token, "alice/a model", "must be NAMESPACE/NAME"),
    ],
)
def test_access_check(server, monkeypatch, token, repo_id, message):
    monkeypatch.setenv("HF_TOKEN", token)
    if message:
        with pytest.raises(InputError, match=message):
            check_hub_access(HubRepository(repo_id))
    else:
        check_hub_access(HubRepository(repo_id))
    assert not server.requests("POST")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("character", ["\u200b", " "])
def test_a_token_with_a_character_that_none_has(monkeypatch, character):
    """As it is pasted from a page that shortens or decorates it."""
    monkeypatch.setenv("HF_TOKEN", f"hf_abc{character}d")
    with pytest.raises(InputError, match=rf"letters, digits .* \(U\+{ord(character):04X}\) at character 7. Copy it"):
        check_hub_access(HubRepository("alice/tiny"))
    assert isinstance(hub_error("asked", OSError("no")), InputError)
    with pytest.raises(InputError, match="Copy it again"):
        hub_error("asked", UnicodeEncodeError("latin-1", character, 0, 1, "ordinal not in range(256)"))
    other = OSError("no connection")
    other.__context__ = UnicodeEncodeError("latin-1", character, 0, 1, "ordinal not in range(256)")
    with pytest.raises(InputError, match="Copy it again"):
        hub_error("asked", other)
    monkeypatch.setenv("HF_TOKEN", "hf_abcd\n")  # whose line end is removed
    check_token()


@pytest.mark.usefixtures("server")
def test_access_check_of_private_repositories_and_tags():
    check_hub_access(PRIVATE)
    push(repository=HubRepository(REPO, tag="v1"))
    check_hub_access(REPOSITORY)
    for refused, message in (
        (PRIVATE, "exists and is public"),
        (HubRepository(REPO, branch="v1"), "v1 is a tag of"),
        (HubRepository(REPO, tag="v1"), "must be new"),
    ):
        with pytest.raises(InputError, match=message):
            check_hub_access(refused)


def test_access_check_without_a_hub(server, monkeypatch):
    server.fault("whoami")
    check_hub_access(REPOSITORY)
    server.fault("whoami", times=2)
    with pytest.raises(HubAwayError, match=r"cannot be used.*503"):
        check_hub_access(REPOSITORY)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubAwayError, match=r"127\.0\.0\.1:9 cannot be used"):
        check_hub_access(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        check_hub_access(REPOSITORY)


def test_a_push_creates_the_repository_and_the_next_sends_what_changed(server):
    check_hub_access(REPOSITORY)
    assert server.repository(REPO) is None
    first = push(repository=PRIVATE)
    assert first.startswith(f"{server.endpoint}/{REPO}/commit/")
    assert stored_files(server) == FILES
    assert server.repository(REPO)["private"]  # type: ignore[index]
    assert push(title="unchanged") == first
    assert push(changed := FILES | {"weights/1": b"2"}, title="second") != first
    assert stored_files(server) == changed
    assert titles(server) == ["trained", "second"]
    assert len(server.requests("PUT", "/lfs/")) == 1


REQUESTS = (
    "repos/create", "branch/trial", "validate-yaml", "preupload", "lfs/objects/batch", "/lfs/[0-9a-f]{64}[?]",
    "/lfs/[0-9a-f]{64}/verify", "commit/trial", "tag/",
)  # fmt: skip


@pytest.mark.parametrize(
    ("request_path", "fault"), [(path, FAULTS[row % len(FAULTS)]) for row, path in enumerate(REQUESTS)]
)
def test_a_push_outlives_faults(server, request_path, fault):
    server.fault(request_path, method="POST|PUT", times=2 if "status" in fault else 1, **fault)
    push(repository=HubRepository(REPO, branch="trial", tag="v1"))
    assert any(entry["fault"] != "none" for entry in server.requests())
    assert stored_files(server, "trial") == FILES
    assert titles(server, "trial") == ["trained"]
    assert titles(server) == []
    assert server.repository(REPO)["tags"] == {"v1": "trained"}  # type: ignore[index]


def test_a_push_that_fails_says_where_the_files_are(server, monkeypatch):
    server.fault("commit/main", times=5)
    with pytest.raises(hub.HubPushError, match=r"503.*are kept in folder; run the same command again"):
        push()
    assert len(server.requests("POST", "commit/main")) == 5
    monkeypatch.setenv("HF_TOKEN", server.read_token)
    with pytest.raises(hub.HubPushError, match="403"):
        push()
    assert len(server.requests("POST", "commit/main")) == 5


@pytest.mark.parametrize(
    "existing",
    [
        {"data.parquet": b"rows"},
        {"README.md": b"---\nlicense: mit\n---\n\n# Mine\n\nCite it.\n"},
        {"README.md": b"A card without metadata"},
        {"training.json": b"{}", "run.json": b"{}"},
        {"weights/1": b"somebody's"},
    ],
)
def test_a_repository_of_others_is_refused_and_untouched(existing, server):
    for path, content in existing.items():
        server.put(REPO, path, content)
    before = server.repository(REPO)
    with pytest.raises(InputError, match=r"contains files that this tool did not create.*--hub-revision"):
        check_hub_access(REPOSITORY)
    with pytest.raises(hub.HubPushError, match="contains files that this tool did not create"):
        push()
    assert server.repository(REPO) == before


@pytest.mark.parametrize(
    ("card", "pushed", "license_name"),
    [
        ("", CARD, None),
        ("---\nlicense: mit\n---\n", CARD, "mit"),
        ("---\nlicense: mit\n---", CARD, "mit"),
        ("---\nlicense: mit\n---\n", CARD.replace("tags", "license: apache-2.0\ntags"), "apache-2.0"),
    ],
)
def test_the_card_of_a_new_repository_keeps_only_its_license(card, pushed, license_name, server):
    server.put(REPO, "README.md", card.encode())
    check_hub_access(REPOSITORY)
    for _ in range(2):
        push({"README.md": pushed.encode()})
        stored = RepoCard(stored_files(server)["README.md"].decode())
        assert (stored.data.get("license"), stored.data.tags, stored.text) == (license_name, ["ours"], "\nmade by us\n")
    assert len(titles(server)) == 2


def test_files_and_edits_of_others_stay(server, caplog):
    push()
    theirs = {"LICENSE": b"theirs", "weights/theirs": b"theirs", "README.md": EDITED_CARD}
    for path, content in theirs.items():
        server.put(REPO, path, content)
    check_hub_access(REPOSITORY)
    push({"README.md": NEWER_CARD, "weights/2": b"2"}, stale=r"weights/\d|model\..*")
    assert "was edited on the Hub, so it is not replaced" in caplog.text
    assert stored_files(server) == theirs | {"weights/2": b"2"}


def test_an_edit_during_the_push_stays(server, monkeypatch):
    push()
    open_branch = hub.open_branch

    def open_and_edit(*arguments: Any) -> hub.Branch:
        branch = open_branch(*arguments)
        if len(titles(server)) == 1:
            server.put(REPO, "README.md", EDITED_CARD)
        return branch

    monkeypatch.setattr(hub, "open_branch", open_and_edit)
    push({"README.md": NEWER_CARD, "weights/2": b"2"})
    assert stored_files(server) == FILES | {"README.md": EDITED_CARD, "weights/2": b"2"}


@pytest.mark.parametrize("path", ["run.json"])
def test_records_mark_a_repository_without_a_card(path, server):
    push(files := {path: b'{"tokenizer_sha256": "0", "fingerprint": {}}', "weights/1": b"0"})
    check_hub_access(REPOSITORY)
    push()
    assert stored_files(server) == files | FILES


@pytest.mark.parametrize("fault", FAULTS[1:], ids=["429", "reset", "lost"])
def test_a_repository_that_cannot_be_read_is_not_empty(fault, server):
    push()
    server.put(REPO, "README.md", EDITED_CARD)
    for path in ("/tree/", "README.md"):
        server.fault(path, method="GET", **fault)
    push({"README.md": NEWER_CARD})
    assert stored_files(server)["README.md"] == EDITED_CARD
