"""Settings of fine-tuning: files are checked before anything else; defaults that depend on other settings."""

import pytest

from finetuning.config.embedding import EmbeddingConfig
from finetuning.config.settings import (
    ChoiceConfig,
    ClassificationConfig,
    CustomConfig,
    QuestionConfig,
    TaggingConfig,
    parse_finetuning_config,
)
from mlm_common.errors import InputError
from train.checkpoints.resume import fingerprint_sha256


@pytest.mark.parametrize("flag", ["--train-file", "--test-file"])
def test_a_mistyped_file_is_one_line_with_the_nearest(flag, tmp_path):
    (tmp_path / "xquad_train.json").write_text("{}", encoding="utf-8")
    flags = ["--init-from", "no/such/model", "--output-dir", str(tmp_path / "run"), "--max-seq-length", "9999"]
    with pytest.raises(InputError) as refused:
        parse_finetuning_config(QuestionConfig, [*flags, flag, f"{tmp_path}/xquad_trian.json"], "")
    expected = f"{flag}: there is no file {tmp_path}/xquad_trian.json; did you mean {tmp_path}/xquad_train.json?"
    assert str(refused.value) == expected
    assert parse_finetuning_config(QuestionConfig, [*flags, flag, "gs://bucket/xquad.json"], "")


def test_embeddings_take_folders_in_beirs_format_and_no_others(tmp_path):
    flag = "--test-file"
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


# Settings that are in fingerprints, and settings that are not.
FLAGS = "--init-from model --output-dir run --layer-lr-decay 0.9 --seed 3 --optimizer muon --muon-momentum 0.9"
OTHER_FLAGS = "--dropout 0.1 --gradient-checkpointing --num-epochs 2 --no-load-best-model-at-end --modelled-step-ms 3"


@pytest.mark.parametrize(
    ("config_class", "task_flags", "sha256"),
    [
        (
            ClassificationConfig,
            "--label-smoothing 0.1",
            "6f60b992dda204b2ae9b9e810a78014ab75aa34e718073f22fb15ccb0693718a",
        ),
        (TaggingConfig, "--similar-labels keep", "7fd3733bb438a5311e159ac5df886fcddd72faefba0f480c9d3013d84dbdebd8"),
        (ChoiceConfig, "", "c9c41c08f44078a0966988d1a0af281ac68ada338914b0edaf595bfcd541ba58"),
        (QuestionConfig, "--doc-stride 9", "bd48dc3d490e9cf9fa11591eeb6e81f804ba072a66eb97c0d7baae265fe36371"),
        (CustomConfig, "--task task.py:Task", "02fdc0657427a161f4508b15f8d68b3a2e04260b142eb392cb75ef0992a4c6fa"),
        (
            EmbeddingConfig,
            "--pooling cls --query-prompt q",
            "7a733ac85de5378c26586ddfa4c01a916db320f50cdfb6b58da47ed80aca1c19",
        ),
    ],
)
def test_a_run_keeps_its_identity(config_class, task_flags, sha256):
    """A run of an earlier version resumes only if this hash stays."""
    config, other = (
        parse_finetuning_config(config_class, f"{FLAGS} {task_flags} {other_flags}".split(), "")
        for other_flags in ("", OTHER_FLAGS)
    )
    assert fingerprint_sha256(config.identity()) == fingerprint_sha256(other.identity()) == sha256
    assert config.as_dict() != other.as_dict()
