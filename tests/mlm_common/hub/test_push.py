"""Pushes to repositories that are new, of this project, or of others, with and without faults."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import RepoCard

from mlm_common.errors import InputError
from mlm_common.hub import push as hub
from mlm_common.hub.access import check_hub_access
from mlm_common.hub.push import HubRepository, mark_card
from tests.servers.fixtures import HubHandle

REPO = "alice/model"
REPOSITORY = HubRepository(REPO)
PRIVATE = HubRepository(REPO, private=True)
WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def server(hub_here: HubHandle) -> HubHandle:
    return hub_here


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export of a model"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text(mark_card("---\nlicense: apache-2.0\n---\n"), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "sub" / "config.json").write_text("{}", encoding="utf-8")
    return folder


def stored_files(server: HubHandle, branch: str = "main") -> dict[str, bytes]:
    files = server.files(REPO, revision=branch)
    return {path: content for path, content in files.items() if path != ".gitattributes"}


def local_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def push(folder: Path, repository: HubRepository, title: str, **options: Any) -> str:
    files = {name: folder / name for name in local_files(folder)}
    return hub.push_files(files, repository, commit_message=title, kept_in=str(folder), **options)


def commit_titles(server: HubHandle) -> list[str]:
    repository = server.repository(REPO)
    assert repository
    return repository["commits"]


def test_push_creates_the_repository(server: HubHandle, export: Path) -> None:
    check_hub_access(REPOSITORY)
    assert server.repository(REPO) is None
    url = push(export, PRIVATE, "trained")
    assert url.startswith(f"{server.endpoint}/{REPO}/commit/")
    assert stored_files(server) == local_files(export)
    assert commit_titles(server) == ["initial commit", "trained"]
    assert server.repository(REPO)["private"]  # type: ignore[index]


def test_second_push_sends_what_changed(server: HubHandle, export: Path) -> None:
    first = push(export, REPOSITORY, "first")
    assert push(export, REPOSITORY, "unchanged") == first
    assert commit_titles(server) == ["initial commit", "first"]
    (export / "sub" / "config.json").write_text('{"changed": 1}', encoding="utf-8")
    assert push(export, REPOSITORY, "second") != first
    assert stored_files(server) == local_files(export)
    assert len(server.requests("PUT", "/lfs/")) == 1


@pytest.mark.parametrize("step", ["repos/create", "preupload", "lfs/objects/batch", "/lfs/[0-9a-f]{64}", "commit/main"])
@pytest.mark.parametrize(
    "fault",
    [{"status": 503}, {"status": 429, "headers": {"Retry-After": "0"}}, {"mode": "reset"}, {"mode": "lost_answer"}],
    ids=["503", "429", "reset", "lost"],
)
def test_push_outlives_faults(server: HubHandle, export: Path, step: str, fault: dict[str, object]) -> None:
    server.fault(step, method="POST|PUT", times=2 if "status" in fault else 1, **fault)
    push(export, REPOSITORY, "trained")
    assert stored_files(server) == local_files(export)
    assert commit_titles(server) == ["initial commit", "trained"]


def test_failed_push_keeps_the_folder_and_says_how(server: HubHandle, export: Path) -> None:
    server.fault("commit/main", times=5)
    before = local_files(export)
    with pytest.raises(hub.HubPushError, match="503") as caught:
        push(export, PRIVATE, "trained")
    assert len(server.requests("POST", "commit/main")) == 5
    assert local_files(export) == before
    advice = shlex.split(str(caught.value).rpartition(": ")[2])
    assert advice == ["hf", "upload", REPO, str(export), ".", "--private", "--include", *sorted(before)]
    subprocess.run([Path(sys.executable).with_name(advice[0]), *advice[1:]], check=True, timeout=60)
    assert stored_files(server) == before
    check_hub_access(REPOSITORY)


def test_push_that_may_not_write_is_not_repeated(
    server: HubHandle, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", server.read_token)
    with pytest.raises(hub.HubPushError, match="403"):
        push(export, REPOSITORY, "trained")
    assert len(server.requests("POST")) == 1


def test_in_a_process_of_its_own(hub_server: HubHandle, export: Path) -> None:
    """The fixture's environment is all that a command needs, and importing the module costs next to nothing."""
    code = f"""
import sys
from pathlib import Path
from mlm_common.hub import access as hub_access
from mlm_common.hub import push as hub
assert "huggingface_hub" not in sys.modules
repository = hub.HubRepository({REPO!r})
hub_access.check_hub_access(repository)
files = {{name: Path({str(export)!r}, name) for name in {list(local_files(export))!r}}}
print(hub.push_files(files, repository, commit_message="trained", kept_in={str(export)!r}))
from huggingface_hub import snapshot_download
print(snapshot_download({REPO!r}))
"""
    command = [sys.executable, "-c", code]
    environment = os.environ | hub_server.environment
    result = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=60)
    assert result.returncode == 0, result.stderr
    url, snapshot = result.stdout.splitlines()
    assert url.startswith(f"{hub_server.endpoint}/{REPO}/commit/")
    assert local_files(Path(snapshot)) == hub_server.files(REPO)
    assert stored_files(hub_server) == local_files(export)


# What a push makes of the content of a repository.

CARD = "---\ntags:\n- ours\n---\n\nmade by us\n"
FILES = {"README.md": mark_card(CARD).encode(), "weights/1": b"1"}


def push_contents(repository: HubRepository = REPOSITORY, stale: str | None = None, **files: bytes) -> None:
    named = {path.replace("_", "/"): content for path, content in files.items()} or FILES
    hub.push_files(named, repository, commit_message="push", kept_in="folder", stale=stale)


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
def test_a_repository_of_others_is_refused_and_untouched(existing: dict[str, bytes], server: HubHandle) -> None:
    for path, content in existing.items():
        server.put(REPO, path, content)
    before = server.repository(REPO)
    with pytest.raises(InputError, match=r"contains files that this tool did not create.*--hub-revision"):
        check_hub_access(REPOSITORY)
    with pytest.raises(hub.HubPushError, match="contains files that this tool did not create"):
        push_contents()
    assert server.repository(REPO) == before


def test_a_new_branch_starts_without_the_files_of_main(server: HubHandle) -> None:
    server.put(REPO, "data.parquet", b"rows")
    on_a_branch = HubRepository(REPO, branch="ours")
    check_hub_access(on_a_branch)
    push_contents(on_a_branch)
    assert stored_files(server, "ours") == FILES
    assert stored_files(server) == {"data.parquet": b"rows"}
    check_hub_access(on_a_branch)


@pytest.mark.parametrize(
    ("card", "pushed", "license_name"),
    [
        ("", CARD, None),
        ("---\nlicense: mit\n---\n", CARD, "mit"),
        ("---\nlicense: mit\n---", CARD, "mit"),
        ("---\nlicense: mit\n---\n", CARD.replace("tags", "license: apache-2.0\ntags"), "apache-2.0"),
    ],
)
def test_the_card_of_a_new_repository_keeps_only_its_license(
    card: str, pushed: str, license_name: str | None, server: HubHandle
) -> None:
    server.put(REPO, "README.md", card.encode())
    check_hub_access(REPOSITORY)
    for _ in range(2):
        push_contents(**{"README.md": pushed.encode()})
        stored = RepoCard(stored_files(server)["README.md"].decode())
        assert (stored.data.get("license"), stored.data.tags, stored.text) == (license_name, ["ours"], "\nmade by us\n")
    assert len(commit_titles(server)) == 3


def test_files_and_edits_of_others_stay(server: HubHandle, caplog: pytest.LogCaptureFixture) -> None:
    push_contents()
    edited = FILES["README.md"] + b"Cite it.\n"
    for path, content in {"LICENSE": b"theirs", "weights/theirs": b"theirs", "README.md": edited}.items():
        server.put(REPO, path, content)
    check_hub_access(REPOSITORY)
    push_contents(stale=r"weights/\d", **{"README.md": b"---\ntags: []\n---\n\nnewer\n", "weights_2": b"2"})
    assert "was edited there, so it stays as it is" in caplog.text
    theirs = {"LICENSE": b"theirs", "weights/theirs": b"theirs", "README.md": edited}
    assert stored_files(server) == theirs | {"weights/2": b"2"}


def test_an_edit_during_the_push_stays(server: HubHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    push_contents()
    edited, open_branch = FILES["README.md"] + b"Cite it.\n", hub.open_branch

    def open_and_edit(*arguments: Any) -> hub.Branch:
        branch = open_branch(*arguments)
        if len(commit_titles(server)) == 2:
            server.put(REPO, "README.md", edited)
        return branch

    monkeypatch.setattr(hub, "open_branch", open_and_edit)
    push_contents(**{"README.md": b"---\ntags: []\n---\n\nnewer\n", "weights_2": b"2"})
    assert stored_files(server) == {"README.md": edited, "weights/1": b"1", "weights/2": b"2"}


@pytest.mark.parametrize("path", ["training.json", "run.json"])
def test_records_mark_a_repository_without_a_card(path: str, server: HubHandle) -> None:
    files = {path: b'{"tokenizer_sha256": "0", "fingerprint": {}}', "weights": b"0"}
    push_contents(**files)
    check_hub_access(REPOSITORY)
    push_contents(**FILES)
    assert stored_files(server) == files | FILES


@pytest.mark.parametrize("fault", [{"status": 503}, {"mode": "reset"}, {"mode": "lost_answer"}])
def test_a_repository_that_cannot_be_read_is_not_empty(fault: dict[str, object], server: HubHandle) -> None:
    push_contents()
    server.put(REPO, "README.md", edited := FILES["README.md"] + b"Cite it.\n")
    for path in ("/tree/", "README.md"):
        server.fault(path, method="GET", **fault)
    push_contents(**FILES | {"weights/2": b"2"})
    assert stored_files(server) == FILES | {"README.md": edited, "weights/2": b"2"}
