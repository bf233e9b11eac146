"""A run of question answering from its files to its answers."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from finetuning.config.settings import QuestionConfig, QuestionData, parse_finetuning_config
from finetuning.run_qa import main
from finetuning.tasks.questions import QuestionAnswering, QuestionJob
from tests.fixtures.finetuned_runs import qa_flags, write_questions
from tests.fixtures.results import read_json, results
from tests.fixtures.squad_script import squad_evaluate
from train.runtime.machines import Cluster


def test_the_loss_of_both_ends():
    """Padding cannot be an answer, and rows of padding count for nothing."""
    data = QuestionData(max_seq_length=6)
    task = QuestionAnswering(data, may_have_no_answer=False, pad_token_id=1, token_types=False)
    outputs = SimpleNamespace(
        start_logits=tf.constant([[0.0, 2.0, 0.0, 9.0], [0.0] * 4]),
        end_logits=tf.constant([[0.0, 0.0, 1.0, 9.0], [0.0] * 4]),
    )
    rows = {
        "input_ids": tf.constant([[0, 7, 2, 1], [1, 1, 1, 1]]),
        "attention_mask": tf.constant([[1, 1, 1, 0], [0, 0, 0, 0]]),
        "start_position": tf.constant([1, 0]),
        "end_position": tf.constant([2, 0]),
        "index": tf.constant([0, -1]),
    }
    sums = {name: tensor.numpy() for name, tensor in task.sums(lambda *_, **__: outputs, rows, training=False).items()}
    expected = (np.log(2 + np.exp(2.0)) - 2.0 + np.log(2 + np.exp(1.0)) - 1.0) / 2
    assert sums["loss"] == pytest.approx(expected, rel=1e-6)
    assert sums["num_rows"] == 1
    assert sums["start"].shape == (2, 6)
    assert (sums["start"][0, 3:] < -1e8).all()


def assert_scored_by_its_predictions(run: Path, questions: Path, part: str = "eval") -> dict[str, str]:
    """Compare the results with what SQuAD's script gives for predictions.json, and return these."""
    predictions, scores = read_json(run / "predictions.json"), results(run)
    paragraphs = [paragraph for article in read_json(questions)["data"] for paragraph in article["paragraphs"]]
    entries = [entry for paragraph in paragraphs for entry in paragraph["qas"]]
    theirs = squad_evaluate(entries, predictions)
    names = {"exact": "exact_match", **{name: name for name in theirs if "Ans_" in name}}
    for name in ("f1", *names):
        assert scores[f"{part}_{names.get(name, name)}"] == pytest.approx(theirs[name], abs=1e-9)
    assert set(predictions) == {entry["id"] for entry in entries}
    return predictions


@pytest.mark.usefixtures("one_device", "eagerly")
def test_scores_are_those_of_the_predictions(answered, tmp_path, run):
    """Also after another call on the finished run, with other settings for answers."""
    shutil.copytree(answered, tmp_path, dirs_exist_ok=True)
    assert_scored_by_its_predictions(tmp_path / "run", tmp_path / "validation.json")
    assert (tmp_path / "run" / "null_odds.json").exists()
    settings = ("--null-score-diff-threshold", "1000", "--max-answer-length", "1")
    outcome = run(main, *qa_flags(tmp_path, *settings, start=answered))
    assert outcome.status == 0
    second = assert_scored_by_its_predictions(tmp_path / "run", tmp_path / "validation.json")
    assert all(second.values())
    exact_match = results(tmp_path / "run", "eval")["eval_exact_match"]
    assert f"exact match            {exact_match:.2f}%" in outcome.out


def test_questions_whose_answers_were_taken_out_are_not_scored(answered, tmp_path):
    """They have none, where training has an answer to each question."""
    for split in ("train", "test", "validation"):
        write_questions(tmp_path / f"{split}.json", 8, len(split))
    content = read_json(tmp_path / "test.json")
    for paragraph in content["data"][0]["paragraphs"]:
        paragraph["qas"][0]["answers"] = []
    (tmp_path / "test.json").write_text(json.dumps(content), encoding="utf-8")
    for name, is_scored in (("test", False), ("validation", True)):
        flags = qa_flags(tmp_path, "--test-file", str(tmp_path / f"{name}.json"), start=answered)
        job = QuestionJob()
        job.open_run(parse_finetuning_config(QuestionConfig, flags, ""), Cluster())
        assert [part.is_scored for part in (*job.validation.values(), *job.tests)] == [True, is_scored]
