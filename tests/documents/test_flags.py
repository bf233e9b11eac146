"""The flags of the three commands: all listed, the tutorial's among them; `--help` and the configs import little."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tfrecord_prep.config import PrepareConfig
from tokenizer_training.corpus.config import CorpusConfig
from tokenizer_training.train_unigram import OutputConfig
from tokenizer_training.unigram.config import UnigramConfig
from tokenizer_training.unigram.normalization import NormalizationConfig
from train.config import SUBJECTS
from train.tpu_preflight import PreflightConfig

PROJECT = Path(__file__).parents[2]
SLOW_IMPORTS = {
    *("tensorflow", "tf_keras", "torch", "datasets", "pandas", "apache_beam", "matplotlib", "sentencepiece"),
    "google.cloud.storage",
}
CONFIGS = (
    "tokenizer_training.corpus.config",
    "tokenizer_training.unigram.config",
    "tfrecord_prep.config",
    "train.config",
)
CORPUS_FLAGS = """
    dataset_name dataset_config dataset_revision data_files validation_files test_files text_column sample_by split
    validation_split test_split streaming limit validation_percent test_percent trust_remote_code seed
"""
COMMANDS = {
    "tokenizer_training/train_unigram.py": (
        (CorpusConfig, NormalizationConfig, UnigramConfig, OutputConfig),
        CORPUS_FLAGS
        + """normalization lowercase strip_accents replace_quotes split_digits
        vocab_size character_coverage byte_fallback extra_special_tokens pad_vocab_to_multiple_of max_bytes
        output_dir overwrite num_workers batch_size push_to_hub export_to_hub hub_private
        dry_run""",
        "dataset_name dataset_config trust_remote_code batch_size vocab_size limit export_to_hub",
    ),
    "tfrecord_prep/prepare_tfrecord_shards.py": (
        (CorpusConfig, PrepareConfig),
        CORPUS_FLAGS
        + """tokenizer_name_or_path max_length shard_size output_dir chunking num_workers partition_bytes dry_run
        overwrite verify runner beam_options push_to_hub hub_private""",
        """dataset_name dataset_config trust_remote_code tokenizer_name_or_path shard_size split limit max_length
        output_dir""",
    ),
    "train/run_mlm.py": (
        SUBJECTS,
        """
        train_dataset eval_dataset tokenizer max_length shuffle_buffer_size
        preset pretrained_model_config init_from config_overrides position_init dropout
        gradient_checkpointing pad_vocab_to_multiple_of
        masking mlm_probability mask_token_rate random_token_rate
        per_replica_batch_size gradient_accumulation_steps num_epochs max_steps learning_rate schedule warmup_ratio
        warmup_steps decay_ratio min_learning_rate_ratio optimizer weight_decay_rate adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm
        tpu_name tpu_zone gcp_project no_tpu bfloat16 jit_compile tpu_layers steps_per_execution
        output_dir seed log_steps eval_steps save_steps save_minutes keep_checkpoints resume overwrite_output_dir
        on_nonfinite max_loss_rise max_rollbacks supervise stall_minutes max_retries retry_seconds profile dry_run
        hub_model_id hub_private hub_revision hub_tag hub_strategy push_steps resume_from_hub
        hub_license hub_language hub_example
        """,
        """pretrained_model_config tokenizer per_replica_batch_size no_tpu tpu_name tpu_zone gcp_project bfloat16
        train_dataset shuffle_buffer_size eval_dataset num_epochs learning_rate weight_decay_rate max_length
        mlm_probability output_dir hub_model_id""",
    ),
}
# All of run_mlm.py's, so that the same command line can be asked about.
COMMANDS["train/tpu_preflight.py"] = (
    (*SUBJECTS, PreflightConfig),
    COMMANDS["train/run_mlm.py"][1] + "topology find_batch_size vocab_size compiler_python",
    COMMANDS["train/run_mlm.py"][2],
)
COMMANDS["train/doctor.py"] = COMMANDS["train/run_mlm.py"]


@pytest.mark.parametrize("script", COMMANDS)
def test_all_flags_are_listed(script):
    dataclass_types, listed, _ = COMMANDS[script]
    fields = [field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type)]
    assert sorted(fields) == sorted(listed.split())


@pytest.mark.parametrize("script", COMMANDS)
def test_the_tutorials_flags_work_here(script):
    _, listed, tutorial = COMMANDS[script]
    assert set(tutorial.split()) <= set(listed.split())


def run_listing_imports(*arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "script", [*COMMANDS, "train/fill_mask.py", "train/export.py", "train/compare_runs.py", "install.py"]
)
def test_help_imports_nothing_slow(script):
    printed, imported = run_listing_imports(str(PROJECT / script), "--help")
    assert not imported & SLOW_IMPORTS
    for listed in COMMANDS.get(script, (0, ""))[1].split():
        assert f"--{listed.replace('_', '-')}" in printed


@pytest.mark.parametrize("module", CONFIGS)
def test_a_config_imports_nothing_slow(module):
    _, imported = run_listing_imports("-c", f"import {module}")
    assert module in imported
    assert not imported & (SLOW_IMPORTS | {"transformers"})
