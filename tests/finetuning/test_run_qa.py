"""A run of question answering from its files to its answers."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from finetuning.config.settings import QuestionData
from finetuning.run_qa import main
from finetuning.tasks.questions import QuestionAnswering
from tests.fixtures.tiny_classification import WORDS, write_start
from train.model.from_pretrained import load_model


def test_the_loss_of_both_ends() -> None:
    """Padding cannot be an answer, and rows of padding count for nothing."""
    task = QuestionAnswering(
        None, QuestionData(max_seq_length=6), may_have_no_answer=False, pad_token_id=1, token_types=False
    )
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
    sums = {name: one.numpy() for name, one in task.sums(lambda *_, **__: outputs, rows, training=False).items()}
    expected = (np.log(2 + np.exp(2.0)) - 2.0 + np.log(2 + np.exp(1.0)) - 1.0) / 2
    assert sums["loss"] == pytest.approx(expected, rel=1e-6)
    assert sums["num_rows"] == 1
    assert sums["start"].shape == (2, 6)
    assert (sums["start"][0, 3:] < -1e8).all()


def write_questions(path: Path, num: int, seed: int) -> dict[str, str]:
    """Write questions whose answer is the one of two words that the paragraph has; return {id: answer}."""
    draw, answers, paragraphs = random.Random(seed), {}, []
    for number in range(num):
        words = draw.choices(WORDS, k=draw.randint(3, 25))
        answer = draw.choice(["list", "file"])
        words.insert(draw.randint(0, len(words)), answer)
        context, start = " ".join(words), len(" ".join(words[: words.index(answer)])) + (words.index(answer) > 0)
        one = {"id": f"q{number}", "question": "value", "answers": [{"text": answer, "answer_start": start}]}
        paragraphs.append({"context": context, "qas": [one]})
        answers[f"q{number}"] = answer
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return answers


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_it_learns_fifty_questions(tmp_path: Path) -> None:
    answers = write_questions(tmp_path / "squad.json", 50, 3)
    flags = ["--init-from", str(write_start(tmp_path / "start")), "--output-dir", str(tmp_path / "run")]
    flags += [f"--{name}-file={tmp_path}/squad.json" for name in ("train", "validation", "test")]
    flags += ["--max-seq-length", "24", "--doc-stride", "6", "--length-buckets", "16", "24", "--learning-rate", "0.02"]
    flags += ["--per-replica-batch-size", "8", "--num-epochs", "15", "--eval-steps", "1000", "--dropout", "0"]
    assert main(flags) == 0
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["eval_exact_match"] >= 95
    assert results["eval_num_questions"] == 50
    assert results["eval_samples"] > 50  # windows
    assert results["predict_exact_match"] == results["eval_exact_match"]
    predictions = json.loads((tmp_path / "run" / "predictions.json").read_text())
    right = np.mean([predictions[one] == answer for one, answer in answers.items()])
    assert 100 * right == results["eval_exact_match"]
    best = json.loads((tmp_path / "run" / "nbest_predictions.json").read_text())
    assert {one: listed[0]["text"] for one, listed in best.items()} == predictions
    assert not (tmp_path / "run" / "null_odds.json").exists()
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["architectures"] == ["RobertaForQuestionAnswering"]
    load_model(str(tmp_path / "run" / "export"), "TFAutoModelForQuestionAnswering")
