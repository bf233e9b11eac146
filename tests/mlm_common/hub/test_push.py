import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm_common.hub import push as hub
from mlm_common.hub.access import check_hub_access
from mlm_common.hub.own_files import LISTING_NAME
from mlm_common.hub.push import HubRepository
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
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "sub" / "config.json").write_text("{}", encoding="utf-8")
    return folder


def stored_files(server: HubHandle, branch: str = "main") -> dict[str, bytes]:
    files = server.files(REPO, revision=branch)
    return {path: content for path, content in files.items() if path not in (".gitattributes", LISTING_NAME)}


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
