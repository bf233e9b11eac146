import os

import pytest

from mlm_common.errors import InputError
from mlm_common.storage import check_file, check_folder, check_folder_or_hub, did_you_mean, looks_local, output_file


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """Work in a folder that contains work/tokenizer, work/shards/train and books/train/*.txt."""
    monkeypatch.chdir(tmp_path)
    for name in ("work/tokenizer/tokenizer.json", "work/shards/train/manifest.json", "books/train/effi.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.touch()


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~user/a", "a/b/c", "work/tokeniser", "work/tokenizer", "work"])
def test_a_name_that_can_only_be_a_path_looks_local(name):
    assert looks_local(name)


@pytest.mark.parametrize("name", ["roberta-base", "google/electra-base", "google/bert/", "gs://bucket/tokeniser"])
def test_ids_on_the_hub_and_cloud_paths_do_not_look_local(name):
    assert not looks_local(name)
    check_folder_or_hub(name)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("work/tokeniser", "work/tokenizer"),
        ("wrok/tokeniser/", "work/tokenizer"),
        ("work/shrads/train", "work/shards/train"),
        ("work/tokenizer/tokeniser.json", "work/tokenizer/tokenizer.json"),
        ("work/quite-different", None),
        ("elsewhere/tokenizer", None),
        ("gs://bucket/work", None),
    ],
)
def test_the_nearest_path_exists(path, nearest, tmp_path):
    assert did_you_mean(path) == (f"; did you mean {nearest}?" if nearest else "")
    if nearest:
        assert did_you_mean(f"{tmp_path}/{path}") == f"; did you mean {tmp_path}/{nearest}?"


def test_a_missing_folder_is_one_line_with_the_nearest():
    check_folder("work/tokenizer")
    check_folder_or_hub("work/tokenizer")
    check_file("work/tokenizer/tokenizer.json")
    with pytest.raises(InputError, match=r"^There is no folder work/tokeniser; did you mean work/tokenizer\?$"):
        check_folder_or_hub("work/tokeniser")
    with pytest.raises(InputError, match=r"^--model: there is no folder work/xyz\.$"):
        check_folder("work/xyz", "--model")
    with pytest.raises(InputError, match=r"no file work/tokeniser/tokenizer.json; did you mean work/tokenizer/tokeni"):
        check_file("work/tokeniser/tokenizer.json")


def test_an_output_is_a_file_that_a_new_file_may_replace(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("work/scores.json", "new/scores.json", "work/tokenizer/tokenizer.json", str(tmp_path / "scores.json")):
        folder, name = output_file(path, "--output")
        folder.write_text(name, "{}")
        assert (tmp_path / path).read_text(encoding="utf-8") == "{}"
    for path, problem in (("work", "a folder"), ("new/", "a folder"), ("pipe", "a pipe or device")):
        with pytest.raises(InputError, match=f"^--output must name a file; {path} is {problem}"):
            output_file(path, "--output")
    for device in ("/dev/null", "/dev/stdout"):
        with pytest.raises(InputError):  # a superuser could replace it, others cannot write to /dev
            output_file(device, "--output")
