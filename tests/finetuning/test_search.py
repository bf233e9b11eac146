"""Searches: a corpus is embedded once and resumed, answers are the nearest texts, and other vectors are refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetuning.search import main, open_search
from finetuning.tasks.vectors import TextEncoder, read_corpus
from mlm_common.errors import EXIT_INTERRUPTED, InputError
from tests.fixtures.other_environments import made_environment, output_of
from tests.fixtures.results import write_jsonl
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_texts import rows_of

PROJECT = Path(__file__).parents[2]
QUESTIONS = ("the name", "a file")


@pytest.fixture
def flags(embedded: Path, tmp_path: Path) -> list[str]:
    """The flags of a search among the validation passages, without questions."""
    rows = [json.dumps({"title": row["query"], "text": row["passage"], "id": 1}) for row in rows_of("validation")]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    model = ("--model", str(embedded / "run"), "--corpus", str(tmp_path / "corpus.jsonl"))
    return [*model, "--shard-rows", "8", "--per-replica-batch-size", "4"]


def test_the_nearest_texts_answer(flags, embedded, tmp_path, run):
    """Those of all files."""
    outcome = run(main, *flags, "--top-k", "3", *QUESTIONS)
    assert outcome.status == 0, outcome.err
    answers = {}
    for line in outcome.out.splitlines():
        if not line.startswith(" "):
            answers[line] = nearest = []
        else:
            nearest.append(line.split("  ")[-1])
    assert list(answers) == list(QUESTIONS)
    parts = [np.load(path) for path in sorted((tmp_path / "corpus.jsonl.vectors").glob("*.npy"))]
    assert [(len(part), part.dtype) for part in parts] == [(8, np.float32), (8, np.float32), (5, np.float32)]
    encoder = TextEncoder.open(str(embedded / "run" / "export"))
    texts = [f"{row['query']} {row['passage']}" for row in rows_of("validation")]
    whole = encoder.encode(texts, "", 7)
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    cosines = encoder.encode(QUESTIONS, "name: ", 2) @ np.concatenate(parts).T
    for question, of_texts in zip(QUESTIONS, cosines, strict=True):
        best = np.argsort(-of_texts, kind="stable")[:3]
        assert answers[question] == [texts[index].strip() for index in best]
    search = open_search(model=str(embedded / "run"), corpus=str(tmp_path / "corpus.jsonl"), shard_rows=8)
    ((text, score), *others), _ = search.find(QUESTIONS, top_k=99)
    assert " ".join(text.split()) == answers[QUESTIONS[0]][0]
    assert score == pytest.approx(float(cosines[0].max()), abs=1e-5)
    assert len(others) == 20


def test_an_interrupted_command_continues_with_the_next_file(flags, tmp_path, run, monkeypatch, caplog):
    caplog.set_level("INFO")
    for is_read in (False, True):
        assert run(main, *flags, "--vectors-dir", tmp_path / "whole").out.startswith("21 vectors  ")
        assert (f"21 vectors read from {tmp_path}/whole" in caplog.text) == is_read
        assert ("Embedding the texts" in caplog.text) != is_read
        caplog.clear()
    encode, calls = TextEncoder.encode, []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    assert run(main, *flags, "--vectors-dir", tmp_path / "again").status == EXIT_INTERRUPTED
    assert run(main, *flags, "--vectors-dir", tmp_path / "again").status == 0
    assert len(calls) == 4
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


# (content of the corpus, flags, what the error says); {} is the folder of the test.
BAD = [
    ("a\n", "--model {start}", "does not embed texts. Train it with"),
    (None, "", "--corpus: there is no file {}/texts.txt"),
    (
        "one\tother\na\tb\n",
        "--corpus {}/texts.tsv",
        "must name the column of {}/texts.tsv with the text, because",
    ),
    ("a\n", "--corpus {}/*.txt", "--vectors-dir is required if --corpus is a glob"),
]


@pytest.mark.parametrize(("content", "extra_flags", "message"), BAD)
def test_bad_input_is_one_line(content, extra_flags, message, embedded, tiny_start, tmp_path, run):
    if content is not None:
        for ending in ("txt", "tsv"):
            (tmp_path / f"texts.{ending}").write_text(content, encoding="utf-8")
    flags = extra_flags.replace("{start}", str(tiny_start / "start")).replace("{}", str(tmp_path)).split()
    refused = run(main, "--model", embedded / "run", "--corpus", tmp_path / "texts.txt", *flags).refusal
    assert message.replace("{}", str(tmp_path)) in refused
    assert not (tmp_path / "texts.txt.vectors").exists()


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(question, flags, tmp_path, run):
    assert f"A question must not be empty; received {question!r}." in run(main, *flags, "a", question).refusal
    assert not (tmp_path / "corpus.jsonl.vectors").exists()


def test_damaged_vectors_and_those_of_others_are_refused(flags, embedded, tmp_path, run):
    assert run(main, *flags).status == 0
    folder = tmp_path / "corpus.jsonl.vectors"
    before = contents(folder)
    shutil.copytree(embedded / "run" / "export", tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    settings["prompts"]["document"] = "text: "
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "vectors-00001.npy").write_bytes(before["vectors-00001.npy"][:200])
    assert f"{folder}/vectors-00001.npy is damaged. Delete it" in run(main, *flags).error
    for damaged in ("{", "3"):
        (folder / "vectors.json").write_text(damaged, encoding="utf-8")
        assert f"{folder}/vectors.json must be a JSON file" in run(main, *flags).error
    (folder / "vectors.json").write_bytes(before["vectors.json"])
    (folder / "vectors-00001.npy").unlink()
    refused = run(main, *flags, "--model", tmp_path / "model").refusal
    assert f"{folder} has the vectors of another model. Use another --vectors-dir" in refused
    assert "has the vectors of another --shard-rows. Use" in run(main, *flags, "--shard-rows", "9").error
    with (tmp_path / "corpus.jsonl").open("a", encoding="utf-8") as corpus:
        corpus.write('\n{"title": "", "text": "more", "id": 2}\n')
    assert "has the vectors of another corpus. Use another --vectors-dir, or replace" in run(main, *flags).refusal
    assert contents(folder) == {name: content for name, content in before.items() if "00001" not in name}
    (folder / "mine.npy").touch()
    assert run(main, *flags, "--overwrite").out.startswith("22 vectors  ")
    assert (folder / "mine.npy").exists()


def test_a_text_of_a_corpus_may_lack_title_and_metadata(tmp_path):
    rows = [{"_id": "1", "title": "A", "text": "x", "metadata": {}}, {"_id": "2", "text": "y"}]
    rows += [{"_id": "3", "title": None, "text": "z"}, {"_id": "4", "title": "B", "text": ""}]
    path = write_jsonl(tmp_path / "corpus.jsonl", *rows)
    assert read_corpus(str(path), ()) == ["A x", "y", "z", "B"]
    (tmp_path / "text.jsonl").write_text('{"title": "A", "text": 5}', encoding="utf-8")
    with pytest.raises(InputError, match=r"Column text of .* must hold text; row 1 has 5"):
        read_corpus(str(tmp_path / "text.jsonl"), ())


def test_no_question_has_no_answer(flags):
    search = open_search(model=flags[1], corpus=flags[3], shard_rows=8)
    assert search.find([]) == []


@pytest.mark.slow
def test_another_index_reads_the_vectors(flags, tmp_path, tmp_path_factory, run):
    """As the guide shows it."""
    assert run(main, *flags, "--vectors-dir", tmp_path / "vectors").status == 0
    guide = (PROJECT / "docs" / "guides" / "embeddings.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import faiss.*?)```", guide, flags=re.S)
    program = program.replace("corpus.jsonl.vectors", str(tmp_path / "vectors"))
    program += "\nprint(*index.search(vectors, 1)[1][:, 0])"
    python = made_environment(tmp_path_factory, "faiss", "faiss-cpu", "numpy")
    texts = [(row["query"], row["passage"]) for row in rows_of("validation")]
    nearest = map(int, output_of(python, program).split())
    assert [texts[index] for index in nearest] == texts
