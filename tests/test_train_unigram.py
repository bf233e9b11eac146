import argparse
import email.message
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.servers.fixtures import CloudStorageHandle, HubHandle
from tokenizer_training.builtin_corpus import extract_documents
from tokenizer_training.corpus import corpus_config_from_record
from tokenizer_training.tokenizer import SPECIAL_TOKENS, load_tokenizer, special_ids, tokenizer_sha256
from tokenizer_training.train_unigram import main
from tokenizer_training.unigram import MAX_WORD_CHARACTERS, count_words, make_normalizer

SCRIPT = Path(__file__).parent.parent / "tokenizer_training" / "train_unigram.py"
MODULES = [argparse, email.message, json, random, subprocess]
VOCAB_SIZE = 512
FILES = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "training.json"]


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Docstrings of some standard modules, every third with what looks like special tokens."""
    documents = [text for module in MODULES for text in extract_documents(str(module.__file__))]
    documents = [text + " [MASK] <unk> <pad>[SEP]" * (index % 3 == 0) for index, text in enumerate(documents)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="session")
def trained_folder(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert main(arguments(corpus_file, folder)) == 0
    return folder


@pytest.fixture(scope="session")
def tokenizer(trained_folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(trained_folder))


def arguments(corpus_file: Path, folder: Path | str, *more: str) -> list[str]:
    flags = ["--data-files", str(corpus_file), "--vocab-size", str(VOCAB_SIZE), "--validation-percent", "10"]
    return [*flags, "--output-dir", str(folder), *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_script(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *argv]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_folder_as_other_programs_see_it(trained_folder: Path) -> None:
    assert sorted(contents(trained_folder)) == FILES
    tokenizer = AutoTokenizer.from_pretrained(trained_folder)
    assert type(tokenizer) is PreTrainedTokenizerFast
    assert len(tokenizer) == len(tokenizer.get_vocab()) == VOCAB_SIZE
    assert special_ids(tokenizer) == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.added_tokens_decoder[4].lstrip
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    encoding = tokenizer("Return the value.", "The second.")
    assert list(encoding) == ["input_ids", "attention_mask"]
    tokens = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    assert (tokens[0], tokens[-1], tokens.count("[SEP]")) == ("[CLS]", "[SEP]", 2)


def test_mask_stands_for_a_word(tokenizer: PreTrainedTokenizerFast) -> None:
    # What follows must be cut as it would be after the word: the full stop without a space before it.
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Return the [MASK]. the [MASK] is")["input_ids"])
    assert "." in tokenizer.tokenize("Return the value. the")
    assert tokens == ["[CLS]", "▁Return", "▁the", "[MASK]", ".", "▁the", "[MASK]", "▁is", "[SEP]"]


def test_special_tokens_in_plain_text_can_be_spelled(trained_folder: Path) -> None:
    backend = Tokenizer.from_file(str(trained_folder / "tokenizer.json"))
    backend.encode_special_tokens = True
    for token in SPECIAL_TOKENS.values():
        encoding = backend.encode(f"a {token} b{token}", add_special_tokens=False)
        assert not set(encoding.ids) & set(range(5))
        assert "".join(encoding.tokens) == f"▁a▁{token}▁b{token}"


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_decoding_gives_the_normalized_text_back(trained_backend: Tokenizer, text: str) -> None:
    ids = trained_backend.encode(text, add_special_tokens=False).ids
    if 3 not in ids:
        assert trained_backend.decode(ids).strip() == make_normalizer().normalize_str(text.replace("▁", " ")).strip()


@pytest.fixture(scope="session")
def trained_backend(trained_folder: Path) -> Tokenizer:
    backend = Tokenizer.from_file(str(trained_folder / "tokenizer.json"))
    backend.encode_special_tokens = True
    return backend


def test_record(trained_folder: Path, corpus_file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    record = json.loads((trained_folder / "training.json").read_text())
    assert record["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert record["unigram"] == {"vocab_size": VOCAB_SIZE, "character_coverage": 0.9995}
    config = corpus_config_from_record(record["corpus"])
    assert (config.data_files, config.validation_percent) == ([str(corpus_file)], 10)
    assert record["corpus"]["data_files"] == [{"name": str(corpus_file), "num_bytes": corpus_file.stat().st_size}]
    assert {"python", "mlm-pretraining", "sentencepiece", "tokenizers"} <= set(record["versions"])
    num_documents = len(corpus_file.read_text().splitlines())
    held_out = record["held_out"]
    assert held_out["part"] == "validation"
    assert held_out["num_documents"] + record["input"]["num_documents"] == num_documents
    assert held_out["unknown_rate"] < 0.01
    assert 1 < held_out["tokens_per_word"] < 4
    assert 1.5 < held_out["bytes_per_token"] < 5


def test_validation_documents_are_not_trained_on(tmp_path: Path) -> None:
    train, validation = tmp_path / "train.txt", tmp_path / "validation.txt"
    train.write_text("abc abd acd bcd\n" * 50)
    validation.write_text("xyz\n" * 50)
    flags = ["--data-files", str(train), "--validation-files", str(validation), "--vocab-size", "31"]
    assert main([*flags, "--output-dir", str(tmp_path / "out")]) == 0
    assert not any(set("xyz") & set(piece) for piece in load_tokenizer(str(tmp_path / "out")).get_vocab())
    assert json.loads((tmp_path / "out" / "training.json").read_text())["held_out"]["unknown_rate"] > 0.4


def test_two_runs_give_the_same_bytes(trained_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    result = run_script(arguments(corpus_file, folder, "--batch_size", "7"), PYTHONHASHSEED="7")
    assert result.returncode == 0, result.stderr
    assert contents(folder) == contents(trained_folder)


def test_tokenizer_made_otherwise_is_not_replaced(
    trained_folder: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in contents(trained_folder).items():
        (folder / name).write_bytes(content)
    other = arguments(corpus_file, folder, "--character-coverage", "0.99", "--seed", "3")
    assert main(other) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "corpus.settings.seed 0, not 3; unigram.character_coverage 0.9995, not 0.99" in error
    assert "--overwrite" in error
    assert contents(folder) == contents(trained_folder)

    assert main(arguments(corpus_file, folder)) == 0
    assert contents(folder) == contents(trained_folder)

    (folder / "training.json").unlink()
    assert main(arguments(corpus_file, folder)) == 2
    assert "without a training.json" in capsys.readouterr().err

    assert main([*other, "--overwrite"]) == 0
    assert json.loads((folder / "training.json").read_text())["unigram"]["character_coverage"] == 0.99


def test_dry_run_writes_nothing(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments(corpus_file, tmp_path / "out", "--dry-run", "--limit", "5")) == 0
    plan = capsys.readouterr().out
    assert f"{corpus_file} (1 files" in plan
    assert "first 5 documents; parts: train, validation" in plan
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line(tmp_path: Path, corpus_file: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "blank.txt").write_text("\n\n")
    out = ["--output-dir", str(tmp_path / "out")]
    given = ["--data-files", str(corpus_file)]
    cases = [
        (given, "--output-dir is required"),
        (out, "A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files"),
        ([*out, "--data-files", "no*.txt"], "no file matches 'no*.txt'"),
        ([*out, "--data-files", str(tmp_path / "blank.txt")], "every document of"),
        ([*out, *given, "--text-column", "body"], "has text, not 'body'"),
        ([*out, *given, "--vocab-size", "5"], "--vocab-size must leave room beside the 5 special tokens; got 5"),
        ([*out, *given, "--vocab-size", "50"], "--vocab-size must be more than"),
        ([*out, *given, "--vocab-size", "90000"], "at most with this corpus; got 90000"),
        ([*out, *given, "--character-coverage", "9995"], "--character-coverage must be from 0.9 to 1"),
        ([*out, *given, "--batch-size", "0"], "--batch-size must be 1 or more"),
        ([*out, *given, "--push-to-hub", "alice/x", "--export-to-hub"], "give one of them"),
    ]
    for argv, message in cases:
        assert main(argv) == 2, argv
        last_line = capsys.readouterr().err.splitlines()[-1]
        assert last_line.startswith("error: "), argv
        assert message in last_line
    assert not (tmp_path / "out").exists()


def test_largest_vocabulary_named_in_the_error_can_be_had(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = arguments(corpus_file, tmp_path, "--limit", "20")
    assert main([*flags, "--vocab-size", "9000"]) == 2
    largest = capsys.readouterr().err.split("--vocab-size can be ")[1].split()[0]
    assert main([*flags, "--vocab-size", largest]) == 0
    assert len(load_tokenizer(str(tmp_path))) == int(largest)


def test_words_are_counted_after_normalization() -> None:
    counts = count_words([["ﬁne  ``text''\u00a0here\n", "", " here"], ["Here"]])
    assert counts == Counter({"here": 2, "fine": 1, '"text"': 1, "Here": 1})


def test_long_run_without_a_space_is_cut_not_dropped() -> None:
    counts = count_words([["ab" * MAX_WORD_CHARACTERS]])
    assert counts == Counter({"ab" * (MAX_WORD_CHARACTERS // 2): 2})


def test_corpus_without_spaces(tmp_path: Path) -> None:
    random_characters = random.Random(0)
    lines = ["".join(random_characters.choices("天地玄黃宇宙洪荒日月", k=3000)) for _ in range(10)]
    (tmp_path / "chinese.txt").write_text("\n".join([*lines, "天地" * 10_000]))
    flags = ["--data-files", str(tmp_path / "chinese.txt"), "--vocab-size", "60", "--output-dir", str(tmp_path / "out")]
    assert main(flags) == 0
    assert 3 not in load_tokenizer(str(tmp_path / "out"))(lines[0])["input_ids"]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, time; start = time.monotonic()\n"
        "from tokenizer_training.train_unigram import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'tensorflow', 'datasets', 'sentencepiece', 'torch', 'pandas'} & set(sys.modules)\n"
        "print(f'heavy {sorted(heavy)}, seconds {time.monotonic() - start}')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy, seconds = result.stdout.splitlines()[-1].rsplit(maxsplit=1)
    assert heavy == "heavy [], seconds"
    assert float(seconds) < 2


def test_flags_of_the_tutorial(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = set(capsys.readouterr().out.replace(",", " ").split())
    assert {"--dataset_name", "--dataset_config", "--trust_remote_code", "--batch_size"} < flags
    assert {"--vocab_size", "--limit", "--export_to_hub"} < flags


def test_output_in_cloud_storage(corpus_file: Path, trained_folder: Path, cloud_storage: CloudStorageHandle) -> None:
    flags = arguments(corpus_file, f"{cloud_storage.bucket_url}/tokenizer")
    result = run_script(flags, **cloud_storage.environment)
    assert result.returncode == 0, result.stderr
    stored = {name.removeprefix("tokenizer/"): content for name, content in cloud_storage.objects().items()}
    assert stored == contents(trained_folder)


@pytest.mark.parametrize("flags", [["--export_to_hub"], ["--push-to-hub", "alice/unigram-tokenizer-dataset"]])
def test_push_to_the_hub(
    flags: list[str], corpus_file: Path, trained_folder: Path, tmp_path: Path, hub_server: HubHandle
) -> None:
    result = run_script(arguments(corpus_file, tmp_path / "out", *flags), **hub_server.environment)
    assert result.returncode == 0, result.stderr
    pushed = hub_server.files("alice/unigram-tokenizer-dataset")
    assert {name: pushed[name] for name in FILES} == contents(trained_folder)


def test_push_that_cannot_succeed_is_refused_before_training(
    corpus_file: Path, tmp_path: Path, hub_server: HubHandle
) -> None:
    environment = hub_server.environment | {"HF_TOKEN": "wrong"}
    for flags in (["--export_to_hub"], ["--push-to-hub", "alice/x"]):
        result = run_script(arguments(corpus_file, tmp_path / "out", *flags), **environment)
        assert result.returncode == 2
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert "hf auth login" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_rare_ascii_is_kept_and_other_rare_characters_are_not(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and then on the hat\n" * 5000 + "Jan ß\n")
    flags = ["--data-files", str(tmp_path / "corpus.txt"), "--vocab-size", "34", "--output-dir", str(tmp_path / "out")]
    assert main(flags) == 0
    vocabulary = load_tokenizer(str(tmp_path / "out")).get_vocab()
    assert "J" in vocabulary
    assert "ß" not in vocabulary
