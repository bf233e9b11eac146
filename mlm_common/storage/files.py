"""Functions on paths, for callers that do not hold a `Folder` yet."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mlm_common.storage import PARTIAL_SUFFIX, folder_and_name, open_folder
from mlm_common.storage.gcs_client import is_gcs as is_remote

__all__ = ["PARTIAL_SUFFIX", "is_remote"]


def join(folder: str, *names: str) -> str:
    return "/".join([folder.rstrip("/"), *names] if folder else names)


def exists(path: str) -> bool:
    return open_folder(path).exists()


def list_files(folder: str) -> dict[str, int]:
    return open_folder(folder).list_files()


def read_bytes(path: str) -> bytes:
    folder, name = folder_and_name(path)
    return folder.read_bytes(name)


def read_text(path: str) -> str:
    return read_bytes(path).decode("utf-8")


def write_bytes(path: str, data: bytes) -> None:
    folder, name = folder_and_name(path)
    folder.write_bytes(name, data)


def write_text(path: str, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def upload_file(local_path: str, destination: str) -> None:
    folder, name = folder_and_name(destination)
    folder.upload_file(local_path, name)


def upload_folder(local_folder: str, destination: str, last: str = "") -> None:
    open_folder(destination).upload_folder(local_folder, last)


def publish_folder(local_folder: str, destination: str, last: str) -> None:
    open_folder(destination).publish(local_folder, last)


def check_writable(folder: str) -> None:
    open_folder(folder).check_writable()


def delete_files(folder: str, names: Iterable[str]) -> None:
    open_folder(folder).delete_files(names)


def local_copy(folder: str) -> AbstractContextManager[str]:
    return open_folder(folder).local_copy()


@contextmanager
def replacing(path: str) -> Iterator[Path]:
    folder, name = folder_and_name(path)
    with folder.replacing(name) as partial:
        yield partial
