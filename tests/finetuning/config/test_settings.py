"""Settings of fine-tuning: files are checked before anything else; defaults that depend on other settings."""

import pytest

from finetuning.config.embedding import EmbeddingConfig
from finetuning.config.settings import CustomConfig, QuestionConfig, QuestionData, parse_finetuning_config
from mlm_common.errors import InputError


@pytest.mark.parametrize("flag", ["--train-file", "--validation-file", "--test-file"])
def test_a_mistyped_file_is_one_line_with_the_nearest(flag, tmp_path):
    (tmp_path / "xquad_train.json").write_text("{}", encoding="utf-8")
    flags = ["--init-from", "no/such/model", "--output-dir", str(tmp_path / "run"), "--max-seq-length", "9999"]
    with pytest.raises(InputError) as refused:
        parse_finetuning_config(QuestionConfig, [*flags, flag, f"{tmp_path}/xquad_trian.json"], "")
    expected = f"{flag}: there is no file {tmp_path}/xquad_trian.json; did you mean {tmp_path}/xquad_train.json?"
    assert str(refused.value) == expected
    assert parse_finetuning_config(QuestionConfig, [*flags, flag, "gs://bucket/xquad.json"], "")


def test_a_custom_task_decides_what_its_files_are(tmp_path):
    flags = ["--init-from", "model", "--output-dir", str(tmp_path / "run"), "--train-file", str(tmp_path)]
    config = parse_finetuning_config(CustomConfig, [*flags, "--task", "task.py:Task"], "")
    assert config.data.train_file == str(tmp_path)


@pytest.mark.parametrize("flag", ["--train-file", "--validation-file", "--test-file"])
def test_embeddings_take_folders_in_beirs_format_and_no_others(flag, tmp_path):
    flags = ["--init-from", "model", "--output-dir", str(tmp_path / "run"), flag, str(tmp_path)]
    with pytest.raises(InputError) as refused:
        parse_finetuning_config(EmbeddingConfig, flags, "")
    rule = f"{flag} takes a file, or a folder in BeIR's format; {tmp_path} is a folder without corpus.jsonl."
    assert str(refused.value) == rule
    (tmp_path / "corpus.jsonl.gz").touch()
    assert parse_finetuning_config(EmbeddingConfig, flags, "")
    (tmp_path / "corpus.jsonl.gz").rename(tmp_path / "corpus.jsonl")
    assert parse_finetuning_config(EmbeddingConfig, flags, "")
    with pytest.raises(InputError, match="there is no file"):
        parse_finetuning_config(EmbeddingConfig, [*flags[:-1], f"{tmp_path}/missing"], "")


def test_a_folder_of_folders_in_beirs_format_names_the_first(tmp_path):
    """As CQADupStack is."""
    flags = ["--init-from", "model", "--output-dir", str(tmp_path / "run"), "--train-file", str(tmp_path)]
    for names, hint in ((["tex"], "tex? Each"), (["english", "android"], "android or 2 more? Each")):
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "corpus.jsonl").touch()
        with pytest.raises(InputError) as refused:
            parse_finetuning_config(EmbeddingConfig, flags, "")
        assert f"without corpus.jsonl. Did you mean {tmp_path}/{hint} command takes one folder." in str(refused.value)


@pytest.mark.parametrize(("length", "stride"), [(384, 128), (512, 128), (128, 42), (24, 8)])
def test_the_default_stride_fits_the_rows(length, stride):
    assert QuestionData(max_seq_length=length).stride == stride
    assert QuestionData(max_seq_length=length, doc_stride=7).stride == 7
