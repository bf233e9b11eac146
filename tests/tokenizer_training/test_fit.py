"""The figures of a tokenizer's report beside a direct computation, through the command: per source and per script."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.fixtures.generated_text import generated_lines
from tokenizer_training.compare_tokenizers import main as compare
from tokenizer_training.fit import separates_words
from tokenizer_training.train_unigram import main

CHINESE, THAI = (
    "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生",
    "กขคงจฉชซญดตถทนบปผฝพฟมยรลวสหอ",
)


def unspaced(letters: str, num_lines: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=draw.randint(20, 60))) + "。" for _ in range(num_lines)]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Held-out texts of each source, one of two scripts, with rare characters."""
    spaced = generated_lines(400)
    return {
        "en": [*spaced[:150], "a \u2603 b"],
        "zh": unspaced(CHINESE, 150, 1),
        "mixed": [*spaced[150:230], *unspaced(THAI, 80, 2)],
        "little": [*spaced[230:380], "的一是"],
    }


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("fit")
    train = {"en": generated_lines(900)[400:], "zh": unspaced(CHINESE, 400, 3), "mixed": unspaced(THAI, 400, 4)}
    sources = {}
    for name, held_out in texts.items():
        for part, lines in (("train", train.get(name, train["en"][::-1])), ("validation", held_out)):
            content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
            (top / f"{name}-{part}.jsonl").write_text(content, encoding="utf-8")
        sources[name] = {
            "data_files": f"{top}/{name}-train.jsonl",
            "validation_files": f"{top}/{name}-validation.jsonl",
        }
    (top / "sources.json").write_text(json.dumps(sources), encoding="utf-8")
    flags = ["--sources", f"{top}/sources.json", "--output-dir", f"{top}/tokenizer", "--num-workers", "1"]
    assert main([*flags, "--vocab-size", "700"]) == 0
    return top


def encoded(folder: Path, texts: list[str]) -> list[list[str]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[tokenizer.id_to_token(token_id) for token_id in of_text] for of_text in ids]


def test_figures_are_those_of_a_direct_computation(folder, texts):
    report = json.loads((folder / "tokenizer" / "report.json").read_text(encoding="utf-8"))
    every = {"all": [text for of_source in texts.values() for text in of_source]} | texts
    for name, of_source in every.items():
        held_out = report["held_out"] if name == "all" else report["sources"][name]["held_out"]
        tokens = Counter(token for of_text in encoded(folder, of_source) for token in of_text)
        num_tokens = sum(tokens.values())
        num_bytes = sum(count for token, count in tokens.items() if token.startswith("<0x"))
        expected = {
            "num_texts": len(of_source),
            "num_tokens": num_tokens,
            "tokens_per_word": num_tokens / sum(len(text.split()) for text in of_source),
            "bytes_per_token": sum(len(text.encode()) for text in of_source) / num_tokens,
            "characters_per_token": sum(map(len, of_source)) / num_tokens,
            "unknown_rate": tokens["<unk>"] / num_tokens,
            "byte_rate": num_bytes / num_tokens,
        }
        assert {key: held_out[key] for key in expected} == pytest.approx(expected, abs=1e-12), name


def test_each_source_has_the_figure_that_suits_its_script(folder, texts, run):
    report = json.loads((folder / "tokenizer" / "report.json").read_text(encoding="utf-8"))
    rows = {(row["source"], row["has_spaces"]): row for row in report["fit"]}
    assert set(rows) == {("en", True), ("zh", False), ("mixed", True), ("mixed", False), ("little", True)}
    for (source, has_spaces), row in rows.items():
        of_group = [text for text in texts[source] if (" " in text) == has_spaces]
        num_tokens = sum(map(len, encoded(folder, of_group)))
        ratio = num_tokens / sum(len(text.split()) for text in of_group)
        value = (
            {"tokens_per_word": ratio} if has_spaces else {"characters_per_token": len("".join(of_group)) / num_tokens}
        )
        assert {key: row[key] for key in row if "per" in key} == pytest.approx(value)
    # The same command again prints no report; the one of the file is what was printed.
    shown = run(compare, folder / "tokenizer", "--data-files", folder / "zh-validation.jsonl").out
    assert f" {rows['zh', False]['characters_per_token']:.2f} |" in shown


@pytest.mark.parametrize(
    ("text", "has_spaces"),
    [
        ("Das ist ein Satz.", True), ("这是一个句子。", False), ("これは文です。", False), ("นี่คือประโยค", False),
        ("한국어 문장입니다.", True), ("यह एक वाक्य है।", True), ("هذه جملة", True), ("Python 是一种编程语言", False),
        ("12 34", True), ("", True), ("Mr. 王 and Mr. 李 met", True),
    ],
)  # fmt: skip
def test_scripts_without_spaces_are_known(text, has_spaces):
    assert separates_words(text) == has_spaces
