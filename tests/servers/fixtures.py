"""Fixtures of the stand-in servers.

Each gives an object whose `environment` is laid over that of a program under test, before it starts:
`subprocess.run(..., env=os.environ | cloud_storage.environment | hub_server.environment)`.
"""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from mlm_common.hub import push as hub
from mlm_common.hub import retries
from mlm_common.storage import gcs as client
from tests.servers import cloud_storage as cloud_storage_server
from tests.servers import hub as hub_server_module
from tests.servers.process import ServerHandle, ServerProcess

BUCKET = "test-bucket"
LOCAL_HOSTS = "127.0.0.1,localhost"
RETRY_SECONDS = 0.01


class CloudStorageHandle(ServerHandle):
    """A Cloud Storage with one empty bucket."""

    bucket_url = f"gs://{BUCKET}"
    token = cloud_storage_server.TOKEN

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        super().__init__(process)
        self.url = process.url
        self.environment = cloud_environment(process.port, folder)
        self.reset()
        self.make_bucket(BUCKET)

    def make_bucket(self, bucket: str) -> None:
        self._process.control("make_bucket", bucket=bucket)

    def objects(self, bucket: str = BUCKET) -> dict[str, bytes]:
        """Read name -> content of all objects."""
        stored = self._process.control("objects", bucket=bucket)
        return {name: base64.b64decode(content) for name, content in stored.items()}

    def put(self, name: str, content: bytes, bucket: str = BUCKET) -> None:
        """Store an object behind the back of the program under test."""
        self._process.control("put", bucket=bucket, name=name, content=base64.b64encode(content).decode())

    def delete(self, name: str, bucket: str = BUCKET) -> None:
        """Delete an object behind the back of the program under test."""
        self._process.control("delete", bucket=bucket, name=name)

    def authorize(
        self,
        accepted_tokens: list[str] | None = None,
        denied_buckets: Sequence[str] = (),
        denied_permissions: Sequence[str] = (),
    ) -> None:
        """Answer 401 to all but these tokens (None: accept all), 403 for these buckets and permissions."""
        denied = {"denied_buckets": denied_buckets, "denied_permissions": denied_permissions}
        self._process.control("authorize", accepted_tokens=accepted_tokens, **denied)


def cloud_environment(port: int, folder: Path) -> dict[str, str]:
    """Make the variables that lead google-cloud-storage and TensorFlow's client to the stand-in.

    TensorFlow's are read once, when its library is loaded.
    """
    address = f"127.0.0.1:{port}"
    proxy = f"http://{address}"
    certificate = str(folder / cloud_storage_server.CERTIFICATE_NAME)
    return {
        "HTTPS_PROXY": proxy,
        "https_proxy": proxy,
        "NO_PROXY": LOCAL_HOSTS,
        "no_proxy": LOCAL_HOSTS,
        "ALL_PROXY": "",
        "all_proxy": "",
        "CURL_CA_BUNDLE": certificate,
        "REQUESTS_CA_BUNDLE": certificate,
        "SSL_CERT_FILE": certificate,
        "GCE_METADATA_HOST": address,
        "GCE_METADATA_ROOT": address,
        "GCE_METADATA_IP": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": cloud_storage_server.TOKEN,
        "GOOGLE_APPLICATION_CREDENTIALS": "",
        "CLOUDSDK_CONFIG": str(folder),
        "GCS_STAT_CACHE_MAX_AGE": "0",
        "GCS_RETRY_CONFIG_MAX_RETRIES": "3",
        "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "0",
    }


class HubHandle(ServerHandle):
    """A Hub without repositories; the user `alice` is also a member of `lab` (writing) and `library` (reading)."""

    write_token = hub_server_module.WRITE_TOKEN
    read_token = hub_server_module.READ_TOKEN
    fine_grained_token = hub_server_module.FINE_GRAINED_TOKEN  # may write to alice/allowed only

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        super().__init__(process)
        self.endpoint = process.url
        self.environment = {
            "HF_ENDPOINT": process.url,
            "HF_TOKEN": self.write_token,
            "HF_HOME": str(folder),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": LOCAL_HOSTS,
            "no_proxy": LOCAL_HOSTS,
        }
        self.reset()

    def repository(self, repo_id: str, kind: str = "models", revision: str = "main") -> dict[str, Any] | None:
        """Read `private`, `branches`, `tags` with the titles of their commits, and `commits`; None if not there.

        `commits` are the titles of a branch's commits in order, the Hub's initial one first.
        """
        return self._process.control("repository", repo_id=repo_id, kind=kind, revision=revision)

    def files(self, repo_id: str, kind: str = "models", revision: str = "main") -> dict[str, bytes]:
        """Read path -> content of a branch's newest commit; `kind` is `models` or `datasets`."""
        repository = self.repository(repo_id, kind, revision)
        assert repository, f"no repository {repo_id}"
        return {path: base64.b64decode(content) for path, content in repository["files"].items()}

    def commit(self, repo_id: str, kind: str = "models", revision: str = "main") -> str:
        """Read the hash of a branch's newest commit."""
        repository = self.repository(repo_id, kind, revision)
        assert repository, f"no repository {repo_id}"
        return str(repository["sha"])

    def put(self, repo_id: str, path: str, content: bytes, kind: str = "models", revision: str = "main") -> None:
        """Commit a file, making a public repository where there is none, and the branch."""
        encoded = base64.b64encode(content).decode()
        self._process.control("put", repo_id=repo_id, path=path, content=encoded, kind=kind, revision=revision)


@pytest.fixture(scope="session")
def cloud_storage_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    folder = tmp_path_factory.mktemp("cloud-storage-server")
    with ServerProcess("tests.servers.cloud_storage", str(folder)) as process:
        yield process, folder


@pytest.fixture
def cloud_storage(cloud_storage_process: tuple[ServerProcess, Path]) -> CloudStorageHandle:
    return CloudStorageHandle(*cloud_storage_process)


@pytest.fixture
def cloud(cloud_storage: CloudStorageHandle, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStorageHandle]:
    """The stand-in, reached from this process, with short waits between tries.

    It is reached without TLS, proxy and credentials, which are read at import.
    """
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud_storage.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("google.cloud.storage.retry.DEFAULT_RETRY._initial", RETRY_SECONDS)
    client._client.cache_clear()
    yield cloud_storage
    client._client.cache_clear()


@pytest.fixture(scope="session")
def hub_process() -> Iterator[ServerProcess]:
    with ServerProcess("tests.servers.hub") as process:
        yield process


@pytest.fixture
def hub_server(hub_process: ServerProcess, tmp_path: Path) -> HubHandle:
    return HubHandle(hub_process, tmp_path / "hf-home")


@pytest.fixture
def hub_here(hub_server: HubHandle, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubHandle]:
    """The stand-in, reached from this process, with short waits between tries."""
    for name, value in hub_server.environment.items():
        monkeypatch.setenv(name, value)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub_server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{hub_server.environment['HF_HOME']}/hub")
    monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", (RETRY_SECONDS,) * 4)
    monkeypatch.setattr(hub, "CHECK_RETRY_DELAYS_SECONDS", (RETRY_SECONDS,))
    # How often huggingface_hub repeats a request itself differs between its versions.
    defaults: Any = huggingface_hub.utils.http_backoff.__kwdefaults__
    monkeypatch.setitem(defaults, "max_retries", 0)
    forget_sessions()
    yield hub_server
    forget_sessions()


def forget_sessions() -> None:
    """Let huggingface_hub connect as it does by itself, and as the environment says now."""
    retries.configure_sessions.cache_clear()
    if hasattr(huggingface_hub, "configure_http_backend"):
        huggingface_hub.configure_http_backend()
    else:
        httpx: Any = huggingface_hub.utils._http
        huggingface_hub.set_client_factory(httpx.default_client_factory)


@pytest.fixture
def hub_of_transformers(hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubHandle:
    """The stand-in, reached from this process by transformers, too, which read the environment when imported."""
    from transformers.utils import hub

    # Of version 4; version 5 asks huggingface_hub.
    monkeypatch.setattr(hub, "_is_offline_mode", False, raising=False)
    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    return hub_here
