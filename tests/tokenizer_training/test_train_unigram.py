"""The command of stage 1: what its folder holds, that it is always the same, and where it goes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlm_common.corpus.config import corpus_config_from_record
from mlm_common.tokenizer import load_tokenizer, special_ids, tokenizer_sha256
from tests.fixtures.damaged_json import damaged
from tests.fixtures.generated_text import generated_lines
from tests.fixtures.tiny_corpus import contents
from tokenizer_training.report import plain_text_backend
from tokenizer_training.train_unigram import main

SCRIPT = Path(__file__).parents[2] / "tokenizer_training" / "train_unigram.py"
VOCAB_SIZE = 640
NUM_DOCUMENTS = 3000
FILES = [
    "report.json", "report.png", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "training.json",
    "word_starts.npy",
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third document has what looks like special tokens, and some characters are rare."""
    lines = generated_lines(NUM_DOCUMENTS)
    documents = [line + " [MASK] <unk> <pad>[SEP] <0x41>" * (index % 3 == 0) for index, line in enumerate(lines)]
    documents[7] += "語"
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained_folder(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert main(arguments(corpus_file, folder)) == 0
    return folder


@pytest.fixture(scope="session")
def tokenizer(trained_folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(trained_folder))


@pytest.fixture(scope="session")
def plain_text(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """The tokenizer as stage 2 uses it: what reads like a special token is text."""
    return plain_text_backend(tokenizer)


def arguments(corpus_file: Path, folder: Path | str, *extra_flags: str) -> list[str]:
    flags = ["--data-files", str(corpus_file), "--vocab-size", str(VOCAB_SIZE), "--num-workers", "1"]
    return [*flags, "--output-dir", str(folder), *extra_flags]


def test_folder_as_other_programs_see_it(trained_folder):
    assert sorted(contents(trained_folder)) == FILES
    tokenizer = AutoTokenizer.from_pretrained(trained_folder)
    assert type(tokenizer) is PreTrainedTokenizerFast
    assert len(tokenizer) == len(tokenizer.get_vocab()) == VOCAB_SIZE
    assert special_ids(tokenizer) == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.added_tokens_decoder[4].lstrip
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    encoding = tokenizer("One line.", "The second.")
    assert list(encoding) == ["input_ids", "attention_mask"]
    tokens = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    assert (tokens[0], tokens[-1], tokens.count("[SEP]")) == ("[CLS]", "[SEP]", 2)


def test_mask_stands_for_a_word(tokenizer):
    # What follows must be cut as it would be after the word: the full stop without a space before it.
    word = next(piece for piece in tokenizer.convert_ids_to_tokens(range(261, VOCAB_SIZE)) if len(piece) > 6)
    ids = tokenizer(f"{word[1:]} [MASK]. {word[1:]}[MASK] {word[1:]}", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [word, "[MASK]", ".", word, "[MASK]", word]


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.sampled_from(["<0x41>", "[MASK]", "<unk>", "▁", " ", "[CLS]", "\ufeff", "語", "ﬁ", "👩\u200d👩", "▅"]),
        )
    )
)
@settings(max_examples=150)
def test_decoding_gives_the_normalized_text_back(plain_text, parts):
    text = "".join(parts)
    ids = plain_text.encode(text, add_special_tokens=False).ids
    assert not set(ids) & set(range(5))
    # A text's first word is marked with or without a space before it.
    assert plain_text.decode(ids) == plain_text.normalizer.normalize_str(text).removeprefix(" ")


def test_record(trained_folder, corpus_file, tokenizer):
    record = json.loads((trained_folder / "training.json").read_text(encoding="utf-8"))
    assert record["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert record["unigram"]["vocab_size"] == VOCAB_SIZE
    assert record["unigram"]["character_coverage"] == 0.9995
    assert record["normalization"]["normalization"] == "nfkc"
    assert corpus_config_from_record(record["corpus"]).data_files == [str(corpus_file)]
    (file,) = record["corpus"]["data_files"]
    assert (file["path"], file["num_bytes"]) == (str(corpus_file), corpus_file.stat().st_size)
    assert {"python", "mlm-pretraining", "sentencepiece", "tokenizers"} <= set(record["versions"])


def test_report_on_passages_held_out(trained_folder):
    report = json.loads((trained_folder / "report.json").read_text(encoding="utf-8"))
    held_out, used = report["held_out"], report["input"]
    assert held_out["part"] == "train, held out"
    assert used["num_documents"] == NUM_DOCUMENTS
    assert used["num_bytes"] == used["num_sampled_bytes"] + held_out["num_bytes"], "held out, so not counted"
    assert 0.03 < held_out["num_texts"] / NUM_DOCUMENTS < 0.07
    assert held_out["unknown_rate"] == 0
    assert 1 < held_out["tokens_per_word"] < 4
    assert 1.5 < held_out["bytes_per_token"] < 5
    assert report["vocabulary_size"] == VOCAB_SIZE
    assert report["characters"]["most_frequent_dropped"] == [["語", 1]]


def test_validation_split_is_measured_on_and_not_trained_on(tmp_path):
    train, validation, folder = tmp_path / "train.txt", tmp_path / "validation.txt", tmp_path / "out"
    train.write_text("жук жуки кижу икжу\n" * 50, encoding="utf-8")
    validation.write_text("шла\n" * 50, encoding="utf-8")
    flags = ["--data-files", str(train), "--validation-files", str(validation), "--character-coverage", "1"]
    assert main([*flags, "--output-dir", str(folder), "--num-workers", "1"]) == 0
    vocabulary = load_tokenizer(str(folder)).get_vocab()
    assert set("жуки") <= set(vocabulary)
    assert not any(set("шла") & set(piece) for piece in vocabulary)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["held_out"]["part"] == "validation"
    assert report["held_out"]["num_texts"] == 50
    assert report["held_out"]["byte_rate"] == 6 / 7  # the mark, and two bytes of each letter
    assert report["input"]["num_documents"] == 50
    assert report["input"]["num_sampled_bytes"] == report["input"]["num_bytes"]


def test_runs_give_the_same_bytes(tmp_path):
    """With another hash of strings, number of workers and style; the corpus is more than its sample in many blocks."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(generated_lines(18_000, num_words=5_000)) + "\n語 ﬁ é\n", encoding="utf-8")
    extra = ["--max-bytes", "1000000", "--extra-special-tokens", "[ENT]", "[B]", "--pad-vocab-to-multiple-of", "128"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(arguments(corpus, first, *extra)) == 0
    worker_flags = ["--num-workers", "2", "--batch_size", "7"]
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 7\nfigure.facecolor: red\n", encoding="utf-8")
    notebook = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "MATPLOTLIBRC": f"{tmp_path}/matplotlibrc"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments(corpus, second, *extra, *worker_flags)],
        env=os.environ | notebook | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr
    assert sorted(contents(first)) == FILES
    assert contents(first) == contents(second)
    record = json.loads((first / "report.json").read_text(encoding="utf-8"))["input"]
    assert record["sampling_rate"] <= 0.5
    assert record["num_bytes"] > 1_100_000 > 1_000_000 > record["num_sampled_bytes"] > 400_000


def test_tokenizer_of_other_settings_is_not_replaced(trained_folder, corpus_file, tmp_path, run):
    folder = tmp_path / "tokenizer"
    shutil.copytree(trained_folder, folder)
    other = arguments(corpus_file, folder, "--character-coverage", "0.99", "--seed", "3", "--lowercase")
    refused = run(main, *other).refusal
    for setting in ("corpus.settings.seed is 0 there, but 3", "normalization.lowercase is False there, but True"):
        assert f"{setting} is requested" in refused
    assert "--overwrite" in refused
    assert contents(folder) == contents(trained_folder)

    no_influence = ("--on-bad-row", "skip", "--streaming", "--trust-remote-code")  # there are no bad rows
    for extra_flags in ((), no_influence):
        assert main(arguments(corpus_file, folder, "--dry-run", *extra_flags)) == 0, "made with these settings"
    (folder / "training.json").unlink()
    assert main(arguments(corpus_file, folder, "--dry-run")) == 0, "killed while it was saved, it may be trained again"
    (folder / "report.json").unlink()
    assert "without a training.json" in run(main, *arguments(corpus_file, folder)).error

    assert main([*other, "--overwrite"]) == 0
    assert json.loads((folder / "training.json").read_text(encoding="utf-8"))["unigram"]["character_coverage"] == 0.99
    assert sorted(contents(folder)) == FILES


def test_an_existing_tokenizer_is_trained_again_only_if_damaged(trained_folder, corpus_file, tmp_path, caplog):
    folder = tmp_path / "tokenizer"
    shutil.copytree(trained_folder, folder)
    caplog.set_level("INFO")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(arguments(corpus_file, folder)) == 0
    assert "already contains this tokenizer" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text(encoding="utf-8").replace("-", "", 1), encoding="utf-8"
    )
    assert main(arguments(corpus_file, folder)) == 0
    assert "is damaged" in caplog.text
    assert contents(folder) == contents(trained_folder)


def test_output_in_cloud_storage_and_on_the_hub(corpus_file, trained_folder, cloud, hub_here, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub_here.endpoint)  # of what was imported before
    folder = f"{cloud.bucket_url}/tokenizer"
    assert main(arguments(corpus_file, folder, "--export_to_hub", "--publish-details")) == 0
    stored = {name.removeprefix("tokenizer/"): content for name, content in cloud.objects().items()}
    pushed = hub_here.files("alice/unigram-tokenizer-dataset")
    assert stored == {name: pushed[name] for name in FILES} == contents(trained_folder)


def test_other_files_paths_and_excerpts_stay_on_this_machine(tmp_path, hub_here):
    private_file = tmp_path / "private" / "clients.txt"
    private_file.parent.mkdir()
    private_file.write_text("\n".join(generated_lines(400)), encoding="utf-8")
    folder, push = tmp_path / "out", ("--vocab-size", "400", "--push-to-hub", "alice/tokenizer")
    (folder / "more").mkdir(parents=True)
    for name in (".env", "notes.md", "private.txt", "more/tokenizer.json"):
        (folder / name).write_text("a secret", encoding="utf-8")
    assert main(arguments(private_file, folder, *push)) == 0
    pushed = hub_here.files("alice/tokenizer")
    assert sorted(pushed) == sorted([*FILES, ".gitattributes"])
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    excerpts = [example["text"].encode() for example in report["examples"]]
    assert excerpts
    for secret in (b"clients.txt", b"private", str(tmp_path).encode(), b"a secret", *excerpts):
        assert not [path for path, content in pushed.items() if secret in content]
    for path, content in pushed.items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(content)
    assert tokenizer_sha256(load_tokenizer(str(tmp_path / "copy"))) == tokenizer_sha256(load_tokenizer(str(folder)))

    assert main(arguments(private_file, folder, *push, "--publish-details")) == 0
    pushed = hub_here.files("alice/tokenizer")
    assert {name: pushed[name] for name in FILES} == {name: (folder / name).read_bytes() for name in FILES}


def test_what_cannot_be_pushed_is_refused_before_training(corpus_file, tmp_path, hub_here, run, monkeypatch):
    push = arguments(corpus_file, tmp_path / "out", "--push-to-hub", "alice/tokenizer")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "hf auth login" in run(main, *push).error
    monkeypatch.setenv("HF_TOKEN", hub_here.write_token)
    hub_here.put("alice/tokenizer", "tokenizer.json", b"somebody's")
    refused = run(main, *push).refusal
    assert "alice/tokenizer already contains files that this tool did not create (tokenizer.json)" in refused
    assert hub_here.files("alice/tokenizer")["tokenizer.json"] == b"somebody's"
    assert not (tmp_path / "out").exists()
    assert main([*push, "--hub-revision", "unigram"]) == 0
    assert set(FILES) <= set(hub_here.files("alice/tokenizer", revision="unigram"))


@given(st.data())
@settings(max_examples=20)
def test_a_damaged_record_is_one_line_or_the_same_record(trained_folder, corpus_file, tmp_path_factory, run, data):
    record = json.loads((trained_folder / "training.json").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("damaged") / "tokenizer"
    shutil.copytree(trained_folder, folder)
    (folder / "training.json").write_bytes(data.draw(damaged(record)))
    outcome = run(main, *arguments(corpus_file, folder, "--dry-run"))
    if outcome.status:
        assert re.match(rf"error: .*{folder}.* --overwrite", outcome.refusal)
