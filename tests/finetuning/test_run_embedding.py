"""Runs of `run_embedding.py` from rows of text to an export, and the files that they write."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from finetuning.config.embedding import EmbeddingConfig
from finetuning.config.settings import parse_finetuning_config
from finetuning.data.texts import TextInputs
from finetuning.loop.training import FinetuningJob
from finetuning.run_embedding import main
from finetuning.tasks.embedding import Embedding, EmbeddingJob
from finetuning.tasks.vectors import TextEncoder
from tests.fixtures.rankings import direct_scores
from tests.fixtures.results import read_json, results
from tests.fixtures.tiny_classification import write_start
from tests.fixtures.tiny_texts import embedding_flags, rows_of, write_rows
from train.metrics.log import read_metrics
from train.runtime.run_folder import RunFolder


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(RunFolder(run)) if line["split"] == "train"]


def test_a_run_learns_and_writes_its_scores(embedded):
    lines = read_metrics(RunFolder(embedded / "run"))
    assert losses(embedded / "run")[-1] < losses(embedded / "run")[0]
    best = max(line["ndcg_at_10"] for line in lines if line["split"] == "validation")
    scores = results(embedded / "run")
    assert scores["eval_ndcg_at_10"] == pytest.approx(best, abs=1e-6)
    assert scores["predict_num_queries"] <= 9
    assert {"eval_recall_at_1", "eval_mrr_at_10", "predict_ndcg_at_10", "train_loss"} <= set(scores)
    for other in ("random", "tfidf", "bm25"):
        low, high = (scores[f"eval_above_{other}_ndcg_at_10_{end}"] for end in ("low", "high"))
        assert low <= scores["eval_ndcg_at_10"] - scores[f"eval_{other}_ndcg_at_10"] <= high
    assert scores["eval_random_ndcg_at_10"] < scores["eval_tfidf_ndcg_at_10"]
    by_query = np.loadtxt(embedded / "run" / "eval_predictions.txt", skiprows=1)
    np.testing.assert_allclose(by_query.mean(axis=0)[0], best, atol=1e-6)


def test_scores_are_those_of_a_direct_computation(embedded):
    """By BEIR's rules, from the vectors of the export."""
    grades: dict[str, dict[str, int]] = {}
    names: dict[str, str] = {}
    for number, row in enumerate(rows_of("validation")):
        # Of equal cosines the earlier passage comes first; in the direct computation, the later name.
        name = names.setdefault(row["passage"], f"{9999 - number}")
        grades.setdefault(row["query"], {})[name] = 1
    encoder = TextEncoder.open(str(embedded / "run" / "export"))
    cosines = encoder.encode(list(grades), "name: ", 8) @ encoder.encode(list(names), "", 8).T
    similarities = {
        query: dict(zip(names.values(), row, strict=True)) for query, row in zip(grades, cosines.tolist(), strict=True)
    }
    expected, scores = direct_scores(similarities, grades), results(embedded / "run")
    assert (scores["eval_num_queries"], scores["eval_num_passages"]) == (len(grades), len(names))
    for name in ("ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10"):
        assert scores[f"eval_{name}"] == pytest.approx(expected[name], abs=1e-6), name


def test_the_export_is_a_sentence_transformer(embedded):
    export = embedded / "run" / "export"
    paths = [module["path"] for module in read_json(export / "modules.json")]
    assert paths == ["", "1_Pooling", "2_Dense", "3_Normalize"]
    card = (export / "README.md").read_text(encoding="utf-8")
    assert "library_name: sentence-transformers" in card
    assert "model.encode_query" in card
    assert str(embedded) not in card


@pytest.mark.usefixtures("one_device", "eagerly")
@pytest.mark.parametrize("kind", ["single texts", "scored pairs"])
def test_other_rows(kind, tiny_start, tmp_path):
    """Plain text with scored pairs to evaluate on, and scored pairs to train on."""
    lines = [f"the name {index % 7}\tthe file {index % 5}\t{index % 6}\n" for index in range(24)]
    (tmp_path / "validation.tsv").write_text("one\tother\tscore\n" + "".join(lines), encoding="utf-8")
    (tmp_path / "train.tsv").write_text(
        "one\tother\tscore\n" + "".join(lines).replace("file", "path"), encoding="utf-8"
    )
    (tmp_path / "train.txt").write_text("".join(line.replace("\t", " ") for line in lines) + "\n\n", encoding="utf-8")
    flags = embedding_flags(tiny_start / "start", tmp_path, "--max-steps", "2", "--score-column-name", "score")
    flags += ["--length-buckets", "8", "16", "30", "--no-baselines"]
    train = ["--train-file", str(tmp_path / ("train.txt" if kind == "single texts" else "train.tsv"))]
    flags += ["--validation-file", str(tmp_path / "validation.tsv"), *train]
    assert main([*flags, *(["--unsupervised"] if kind == "single texts" else [])]) == 0
    scores = results(tmp_path / "run")
    assert -1 <= scores["eval_spearmanr"] <= 1
    assert scores["eval_num_queries"] == 7


@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_model_may_be_token_embeddings_without_layers(tmp_path):
    start = write_start(tmp_path / "start", "modernbert")
    weights = load_file(start / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name}
    assert len(kept) < len(weights)
    save_file(kept, start / "model.safetensors", {"format": "pt"})
    config = read_json(start / "config.json") | {"num_hidden_layers": 0}
    config.pop("layer_types", None)
    (start / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_rows(tmp_path)
    assert main([*embedding_flags(start, tmp_path), "--max-steps", "2", "--no-baselines"]) == 0
    assert read_json(tmp_path / "run" / "export" / "config.json")["num_hidden_layers"] == 0


# (--embedding-dim, different passages to train on, what the hint says); {} is the folder of the test, and the width 32.
HINTS = [
    (
        "12",
        33,
        "`python recipes/whiten.py {0}/start {0}/train.jsonl work/whitened`, then train with `--init-from work/",
    ),
    ("12", 32, "whiten.py {0}/start TEXTS work/whitened` (TEXTS must have more than 32 different texts), then"),
    ("32", 33, "If it was whitened, train for more steps"),
]


@pytest.mark.parametrize(("dim", "num_passages", "hint"), HINTS)
def test_a_model_that_is_not_better_than_random_weights_says_what_to_do(
    dim, num_passages, hint, tmp_path, monkeypatch, caplog
):
    """The table of scores and the warning agree, because both follow from the interval of the difference."""
    flags = embedding_flags(tmp_path / "start", write_rows(tmp_path), "--embedding-dim", dim)
    config = parse_finetuning_config(EmbeddingConfig, flags, "")
    task: Any = Embedding.__new__(Embedding)
    task.metrics, task.encoder = ("ndcg_at_10",), SimpleNamespace(width=32)
    job = EmbeddingJob.__new__(EmbeddingJob)
    job.validation, job.tests = {}, []
    inputs: Any = TextInputs.__new__(TextInputs)
    vars(inputs)["train_rows"] = SimpleNamespace(passages=SimpleNamespace(num_rows=num_passages))
    phase = SimpleNamespace(task=task, inputs=inputs)
    trainer: Any = SimpleNamespace(phase=phase, run=SimpleNamespace(config=config))
    for score, low, high, warning, row in (
        (0.75, 0.125, 0.375, "", "better by 0.1250 to 0.3750"),
        (0.25, -0.375, 0.125, "not clearly better than", "no clear difference"),
        (0.25, -0.375, -0.125, "worse than", "worse by 0.1250 to 0.3750"),
    ):
        caplog.clear()
        figures = {"ndcg_at_10": score, "random_ndcg_at_10": 0.5, "num_queries": 2, "num_passages": 3}
        figures |= {"above_random_ndcg_at_10_low": low, "above_random_ndcg_at_10_high": high}
        monkeypatch.setattr(FinetuningJob, "write_results", lambda *_, figures=figures: figures)
        assert job.write_results(trainer, 1, lambda _: {}) == figures
        scores = f"{warning} random weights: ndcg at 10 {score:.4f}, with random weights 0.5000. "
        assert [scores in message for message in caplog.messages] == ([True] if warning else [])
        assert row in " ".join(task.describe(figures).values())
    assert hint.format(tmp_path) in caplog.text


TRAIN = '{"query": "a", "passage": "b"}\n{"query": "c", "passage": "d"}\n'
ONE_PASSAGE = '{"query": "a", "passage": "b"}\n{"query": "c", "passage": "b"}\n'
SCORED = '{"a": "x", "b": "y", "s": 1}\n{"a": "x", "b": "z", "s": 0}\n'
RATED = '{"a": "x", "b": "y", "s": 1, "n": 7}\n{"a": "x", "b": "z", "s": 0, "n": 8}\n'
SCORES, SINGLE = "--score-column-name s", "--unsupervised"
# (content of train.jsonl, flags, what the error says); {} is the folder of the test.
BAD = [
    ('{"text": "a"}\n', "", "With --unsupervised, single texts are enough."),
    (TRAIN, SINGLE, "--unsupervised takes one text per row"),
    ('{"text": "a"}\n{"text": "b"}\n', f"{SINGLE} --dropout 0", "--dropout must be above 0 with --unsupervised"),
    (ONE_PASSAGE, "", "must have two or more different passages, which are each other's negatives."),
    (
        SCORED,
        "",
        "s of {}/train.jsonl holds numbers. If they are scores, use --score-column-name s; if not, --text-column",
    ),
    (
        RATED,
        "",
        "Columns s, n of {}/train.jsonl hold numbers. If a column holds the scores of the rows, name it with --score",
    ),
    (RATED, SCORES, "Column n of {}/train.jsonl holds numbers. Name the columns of text with --text-column-names a b."),
    (TRAIN, "--matryoshka-dims 4 64", "--matryoshka-dims must be at most 32"),
    (SCORED, SCORES, "The training split has scores, so --score-column-name must name a column of {}/validation.jsonl"),
    (SCORED, f"{SCORES} --symmetric-loss --validation-file {{}}/other.jsonl", "--symmetric-loss needs pairs without"),
]


@pytest.mark.parametrize(("content", "flags", "message"), BAD)
def test_bad_input_is_one_line(content, flags, message, tiny_start, tmp_path, run):
    for part, rows in (("train", content), ("validation", TRAIN), ("other", SCORED.replace("x", "w"))):
        (tmp_path / f"{part}.jsonl").write_text(rows, encoding="utf-8")
    extra_flags = flags.format(tmp_path).split()
    refused = run(main, *embedding_flags(tiny_start / "start", tmp_path, *extra_flags), "--dry-run").refusal
    assert message.format(tmp_path) in refused
    assert not (tmp_path / "run").exists()
