"""Whether a folder can be written to, checked without a trace; and writes that are refused."""

import os
import tempfile
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from tests.servers.fixtures import CloudStorageHandle

BUCKET = CloudStorageHandle.bucket_url


def paths_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", [".", "missing", "missing/deeper/deepest", "missing/../other/", "there", "there/new"])
def test_check_of_a_writable_folder_leaves_nothing(name, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    open_folder(f"{tmp_path}/{name}").check_writable()
    assert paths_in(tmp_path) == {"there", "there/file"}


@pytest.mark.parametrize("name", ["file", "file/below/it", "dangling", "dangling/below", "n" * 256, f"a/{'n' * 256}/b"])
def test_check_of_a_folder_that_cannot_be(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"must be writable; .*(Not a directory|No such file|too long).*Name another"):
        open_folder(str(tmp_path / name)).check_writable()
    assert paths_in(tmp_path) == {"file", "dangling"}


@pytest.mark.usefixtures("ordinary_user")
def test_check_of_a_folder_without_permission():
    with tempfile.TemporaryDirectory() as folder:  # pytest's are in one that only their owner may enter
        Path(folder).chmod(0o555)
        with pytest.raises(InputError, match="Permission denied"):
            open_folder(str(Path(folder, "new"))).check_writable()
        assert paths_in(Path(folder)) == set()


def test_check_of_a_cloud_folder_leaves_nothing(cloud):
    cloud.put("data/file", b"content")
    for folder in (BUCKET, f"{BUCKET}/", f"{BUCKET}/data", f"{BUCKET}/new/folder/"):
        open_folder(folder).check_writable()
    assert cloud.objects() == {"data/file": b"content"}


@pytest.mark.parametrize("permission", ["storage.objects.create", "storage.objects.delete", "storage.objects.get"])
def test_check_names_the_missing_permission(permission, cloud):
    cloud.authorize(denied_permissions=[permission])
    with pytest.raises(InputError, match=rf"lacks {permission}, the role .*roles/storage\.objectAdmin") as caught:
        open_folder(f"{BUCKET}/data").check_writable()
    assert "\n" not in str(caught.value)
    cloud.authorize()
    open_folder(f"{BUCKET}/data").check_writable()
    assert cloud.objects() == {}, "what a refused deletion left stays"


@pytest.mark.parametrize("name", [b"gr\xfc\xdfe", b"a/\xff/b"])
def test_a_path_that_is_not_utf8_is_refused(name, tmp_path):
    """Neither `tokenizers` nor TensorFlow writes there."""
    with pytest.raises(InputError, match=r"must be UTF-8\. Either b'.*\\x(fc|ff).* is not"):
        open_folder(f"{tmp_path}/{os.fsdecode(name)}").check_writable()
