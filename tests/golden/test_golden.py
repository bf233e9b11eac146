"""What the stages write stays the same, byte for byte where the machine allows it.

`pytest tests/golden -m "slow or not slow" --write-golden` writes golden.json again, on purpose: on a machine that it
does not have, beside what it has of others.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetuning.run_qa import main as run_qa
from tests.finetuning.test_run_qa import qa_flags, write_questions
from tests.fixtures.generated_text import generated_lines
from tests.fixtures.tiny_classification import write_start
from tests.fixtures.tiny_corpus import DOCUMENTS, flags, write_source
from tests.fixtures.tiny_run import run_flags
from tests.golden.digests import digests_of_folder, digests_of_run
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from tokenizer_training.train_unigram import main as train_unigram
from train.run_mlm import main as run_mlm

GOLDEN = Path(__file__).parent / "golden.json"
Check = Callable[[str, Any], None]


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Compare with golden.json, or write it there."""

    def compare(name: str, digests: dict[str, Any]) -> None:
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
        if request.config.getoption("write_golden"):
            of_others = golden.get(name, {}).get("bits", {})
            if "bits" in digests and not digests["bits"].keys() & of_others.keys():
                digests["bits"] |= of_others
            golden[name] = digests
            lines = [f"{json.dumps(key)}: {json.dumps(golden[key], sort_keys=True)}" for key in sorted(golden)]
            GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            return
        expected = golden[name]
        if "bits" not in expected:
            assert digests == expected
            return
        assert digests["layout"] == expected["layout"]
        for line, golden_line in zip(digests["log"], expected["log"], strict=True):
            assert line.keys() == golden_line.keys()
            assert (line["step"], line["split"]) == (golden_line["step"], golden_line["split"])
            numbers = [name for name, value in line.items() if isinstance(value, int | float)]
            assert [line[name] for name in numbers] == pytest.approx(
                [golden_line[name] for name in numbers], rel=2e-3, abs=2e-4
            )
        for machine, bits in digests["bits"].items():
            assert bits == expected["bits"].get(machine, bits)

    return compare


def test_the_tokenizer(tmp_path, check):
    (tmp_path / "text.txt").write_text("\n".join(generated_lines(400)), encoding="utf-8")
    sizes = ("--vocab-size", "400", "--validation-percent", "10")
    assert train_unigram(["--data-files", f"{tmp_path}/text.txt", "--output-dir", f"{tmp_path}/tokenizer", *sizes]) == 0
    check("tokenizer", digests_of_folder(tmp_path / "tokenizer"))


@pytest.mark.parametrize("chunking", ["concat", "full_sentences", "documents", "packed", "segment_pairs"])
def test_the_shards(chunking, tmp_path, check):
    source = write_source(tmp_path)
    texts = [". ".join(f"A {DOCUMENTS[n + m][:9]}" for m in range(2 + n % 9)) for n in range(80)]
    (source / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    extra_flags = ("--chunking", chunking, "--validation-percent", "20")
    assert prepare(flags(source, tmp_path / "shards", *extra_flags)) == 0
    check(f"shards {chunking}", digests_of_folder(tmp_path / "shards"))


@pytest.mark.parametrize(
    ("name", "fixture"), [("mlm", "finished_run"), ("pairs", "pair_run"), ("classes", "classified")]
)
def test_a_run(name, fixture, request, check):
    check(name, digests_of_run(request.getfixturevalue(fixture)))


@pytest.mark.slow
def test_a_run_of_phases(phases_run, check):
    check("phases", digests_of_run(phases_run))


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_in_bfloat16(shards, tmp_path, check):
    assert run_mlm(run_flags(shards, tmp_path / "run", "--bfloat16", "--jit-compile", "true", "--dropout", "0.1")) == 0
    # XLA compiles for the very model of the processor, which neither its name nor its instructions tell.
    check("bfloat16", digests_of_run(tmp_path / "run") | {"bits": {}})


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_of_questions(tmp_path, check):
    write_start(tmp_path / "start")
    write_questions(tmp_path / "train.json", 40, 1)
    write_questions(tmp_path / "validation.json", 12, 2)
    assert run_qa(qa_flags(tmp_path)) == 0
    check("questions", digests_of_run(tmp_path / "run"))
