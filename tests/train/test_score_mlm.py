"""The command on made-up languages, whose answers are known, and beside a direct computation."""

import json
import math
import random
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from tests.fixtures.results import read_json, write_jsonl
from tests.fixtures.tiny_models import one_layer_model, tiny_tokenizer
from train.export import main as export
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.score_mlm import main
from train.scoring.answers import QueriedModel
from train.scoring.measure import KeptAnswers
from train.scoring.pairs import Pair
from train.scoring.queries import Asker

pytestmark = pytest.mark.usefixtures("eagerly")

WORDS = ("the", "of", "a", "function", "list", "value", "returns", "file", "model", "name", "is", "in", "text")
CONTROLS = (", random weights", ", no context")
FEW_NETWORKS = ("--random-networks", "2")


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> str:
    """A model that knows nothing but how frequent the words are: the later in `WORDS`, the rarer."""
    tokenizer = tiny_tokenizer()
    model = one_layer_model("roberta", max_position_embeddings=62)
    bias = model.bias.numpy()
    bias[tokenizer.convert_tokens_to_ids([f"▁{word}" for word in WORDS])] = 1000 - 50 * np.arange(len(WORDS))
    model.bias.assign(bias)
    folder = str(tmp_path_factory.mktemp("counted"))
    export_model(model, tokenizer, folder, model_max_length=60)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    """Pairs of sentences of equal length; the words of the good one are the more frequent."""
    draw = random.Random(3)
    rows = []
    for number in range(100):
        better, worse = sorted((draw.choices(range(len(WORDS)), k=4) for _ in range(2)), key=sum)
        if sum(better) < sum(worse):
            good, bad = (" ".join(WORDS[index] for index in chosen) for chosen in (better, worse))
            row = {"sentence_good": good, "sentence_bad": bad, "field": "frequency"}
            rows.append(row | {"linguistics_term": f"term {number % 2}"})
    return str(write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", *rows))


def test_a_language_of_frequencies(counted, pairs, run, tmp_path, caplog):
    with caplog.at_level("INFO"):
        outcome = run(main, "--model", counted, "--minimal-pairs", pairs, "--output", tmp_path / "scores.json")
    assert outcome.status == 0, outcome.err
    assert [f"{counted}." in caplog.text, f"{counted}, random weights, network 8 of 8." in caplog.text] == [True, True]
    scores = read_json(tmp_path / "scores.json")
    of_model, of_random, of_none = (scores["scores"][f"{counted}{kind}"] for kind in ("", *CONTROLS))
    assert of_model["pairs"]["value"] == 1
    assert of_none["pairs"]["value"] == 0.5  # no sentence has fewer tokens
    assert abs(of_random["pairs"]["value"] - 0.5) < 3 * of_random["pairs"]["standard_error"]
    assert set(of_model["pairs, by term"]) == {"term 0", "term 1"}
    assert [difference["verdict"] for difference in scores["differences"]] == ["better", "better"]
    number = len(Path(pairs).read_text(encoding="utf-8").splitlines())
    assert of_model["pairs"]["standard_error"] == pytest.approx(1.96 / 2 / (number + 1.96**2))  # Wilson's
    assert (of_random["pairs"]["networks"], of_random["pairs"]["items"]) == (8, number)
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in outcome.out.splitlines() if "|" in line]
    assert [counted, f"1.000 ± {of_model['pairs']['standard_error']:.3f} *"] in cells


def test_bits_and_words_of_a_text(counted, run, cloud, tmp_path):
    bucket = f"{cloud.bucket_url}/counted"
    open_folder(bucket).upload_folder(counted)
    text = tmp_path / "text.txt"
    text.write_text("the of\nthe list the\n", encoding="utf-8")
    outcome = run(main, "--model", bucket, "--text", text, *FEW_NETWORKS, "--output", f"{cloud.bucket_url}/scores.json")
    assert outcome.status == 0, outcome.err
    scores = json.loads(open_folder(cloud.bucket_url).read_text("scores.json"))["scores"]
    of_model, of_none = scores[bucket], scores[f"{bucket}, no context"]
    # Each word less than the first costs 50 nats; there are 6 + 12 bytes.
    assert of_model["bits per byte"]["value"] == pytest.approx((50 + 200) / math.log(2) / 18, rel=0.02)
    assert of_model["words, 1st guess"]["value"] == 0.6
    assert of_model["words, 5 guesses"]["value"] == 1.0
    frequencies = -(3 * math.log2(3 / 5) + 2 * math.log2(1 / 5)) / 18
    assert of_none["bits per byte"]["value"] == pytest.approx(frequencies)
    assert of_none["bits per byte, by place in the row"]["quarter 1"]["items"] == 5


def test_answers_are_those_of_the_network_for_any_batch():
    tokenizer = tiny_tokenizer()
    sentences = ["the function returns a list of text", "a zq file", "model " * 20, "of"]
    pairs = [Pair(*two, "", "") for two in (sentences[:2], sentences[2:])]
    queries, _ = Asker(tokenizer, 60, left_to_right=False).about_pairs(pairs)
    num_ids = max(tokenizer.get_vocab().values()) + 1
    num_answered = 0

    def advance(number):
        nonlocal num_answered
        num_answered += number

    network = one_layer_model("roberta", max_position_embeddings=62)
    model = QueriedModel(network, TensorFlowRuntime(tf.distribute.get_strategy()), num_ids, 1)
    answers = model.answer(queries, [16, 60], advance=advance)
    assert num_answered == len(queries)
    for query, nats, rank in zip(queries, *answers, strict=True):
        logits = model.network({"input_ids": tf.constant([query.ids])}).logits.numpy()[0, query.positions[0], :num_ids]
        assert nats == pytest.approx(np.log(np.exp(logits).sum()) - logits[query.targets[0]], abs=1e-5)
        assert rank == (logits > logits[query.targets[0]]).sum()
    for tokens_per_batch in (1, 100, 512):
        again = model.answer(queries, [60], tokens_per_batch)
        np.testing.assert_allclose(again.nats, answers.nats, atol=1e-5)
        np.testing.assert_array_equal(again.ranks, answers.ranks)


@pytest.mark.usefixtures("one_device")
def test_scores_in_the_folder_of_a_run_are_on_the_card_of_the_scored_weights(finished_run, run, tmp_path, caplog):
    scored_run = tmp_path / "run"
    shutil.copytree(finished_run, scored_run)
    text, pairs = tmp_path / "secret.txt", tmp_path / "pairs.jsonl"
    text.write_text("a corpus of small words\nmakes many rows\n", encoding="utf-8")
    row = {"sentence_good": "a corpus of", "sentence_bad": "of a corpus", "field": "secret field"}
    pairs.write_text(json.dumps(row), encoding="utf-8")
    scores_path = scored_run / "scores.json"
    flags = ("--text", text, "--minimal-pairs", pairs, "--left-to-right", *FEW_NETWORKS, "--output", scores_path)
    assert run(main, "--model", scored_run, *flags).status == 0

    def card_of(checkpoint, name):
        assert run(export, checkpoint, tmp_path / name).status == 0
        return (tmp_path / name / "README.md").read_text(encoding="utf-8")

    card, scores = card_of(scored_run, "newest"), read_json(scores_path)
    for name, title in (("", "this model"), (CONTROLS[0], "random weights"), (CONTROLS[1], "no context")):
        of_name = scores["scores"][f"{scored_run}{name}"]
        bits = of_name["bits per byte"]
        assert f"| {title} | {bits['value']:.3f} ± {bits['standard_error']:.3f} | " in card
        assert f" | {of_name['pairs']['value']:.3f} ± {of_name['pairs']['standard_error']:.3f} |" in card  # of one pair
    assert "bits per byte, n = 8 |" in card
    not_differing = [
        difference["measure"]
        for difference in scores["differences"]
        if "random" in difference["from"] and not difference["differs"]
    ]
    assert f"The model does not differ from random weights in: {', '.join(not_differing)}." in card
    assert "With each scored token, the tokens after it in the same word are masked, too." in card
    assert "secret" not in card
    assert str(tmp_path) not in card
    unscored = card_of(finished_run, "unscored")
    assert card_of(scored_run / "checkpoints" / "step-00000003", "earlier").count("±") == unscored.count("±") == 0
    scores_path.write_text("[1]", encoding="utf-8")
    with caplog.at_level("WARNING"):
        assert card_of(scored_run, "damaged") == unscored
    assert "scores.json is not a file of score_mlm.py" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--text is required, or --minimal-pairs; received neither"),
        (["--text", "dots.txt", "--picture", "curve.svg"], "--picture must end in .svg or .png, and needs --all"),
        (["--text", "dots.txt", "--run", "nowhere"], "--run must be the OUTPUT_DIR of a run with checkpoints; rec"),
        (["--minimal-pairs", "pears.jsonl"], "--minimal-pairs: there is no file pears.jsonl"),
        (["--text", "table.tsv"], "--text needs files that end in .txt"),
        (["--text", "dots.txt"], "--text must contain words; none was found"),
        (["--text", "dots.txt", "--output", "scores.csv"], "--output must end in .json; received scores.csv"),
    ],
)
def test_bad_input_is_one_line(flags, message, counted, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table.tsv").touch()
    Path("dots.txt").write_text("… --- .\n", encoding="utf-8")
    assert message in run(main, "--model", counted, *flags).refusal


def test_a_model_of_another_kind_is_one_line(counted, run, pairs, tmp_path):
    shutil.copytree(counted, tmp_path / "tagger")
    config = read_json(tmp_path / "tagger/config.json") | {"architectures": ["RobertaForTokenClassification"]}
    (tmp_path / "tagger/config.json").write_text(json.dumps(config), encoding="utf-8")
    outcome = run(main, "--model", tmp_path / "tagger", "--minimal-pairs", pairs)
    assert "is not a masked language model but a RobertaForTokenClassification" in outcome.refusal


@pytest.mark.slow
def test_a_killed_scoring_continues_with_the_next_model(counted, pairs, run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(counted, other)
    weights = other / "model.safetensors"
    changed = {name: array * 0.9 for name, array in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    flags = ("--model", counted, other, "--minimal-pairs", pairs, *FEW_NETWORKS, "--output")
    assert run(main, *flags, tmp_path / "whole.json").status == 0
    num_loaded = 0

    def load_two(*args):
        nonlocal num_loaded
        num_loaded += 1
        if num_loaded == 2:
            raise KeyboardInterrupt
        return load_model(*args)

    monkeypatch.setattr("train.scoring.measure.load_model", load_two)
    assert run(main, *flags, tmp_path / "scores.json").status != 0
    assert run(main, *flags, tmp_path / "scores.json").status == 0
    assert num_loaded == 3  # the first model was not scored again
    assert (tmp_path / "scores.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert run(main, *flags, tmp_path / "scores.json").status == 0
    assert num_loaded == 3


def test_files_are_written_before_tables_are_printed(counted, pairs, run, tmp_path, monkeypatch):
    def end(*_):
        raise BrokenPipeError

    monkeypatch.setattr("train.scoring.tables.as_text", end)
    output = tmp_path / "scores.json"
    with suppress(BrokenPipeError):
        run(main, "--model", counted, "--minimal-pairs", pairs, *FEW_NETWORKS, "--output", output)
    assert read_json(output)["scores"][counted]["pairs"]["value"] == 1


@pytest.mark.slow
def test_the_learning_curve_of_a_run(finished_run, run, tmp_path):
    text, pairs = tmp_path / "text.txt", tmp_path / "pairs.jsonl"
    text.write_text("a corpus of small words\nmakes many rows\n", encoding="utf-8")
    orders = [("a corpus of", "of a corpus"), ("small words", "words small"), ("makes rows", "many makes")]
    write_jsonl(pairs, *({"sentence_good": good, "sentence_bad": bad} for good, bad in orders))
    flags = ("--minimal-pairs", pairs, "--text", text, *FEW_NETWORKS, "--output")
    curve = tmp_path / "curve.svg"
    checkpoints = ("--run", finished_run, "--all-checkpoints", "--picture", curve)
    outcome = run(main, *checkpoints, *flags, tmp_path / "scores.json")
    assert outcome.status == 0, outcome.err
    tables = outcome.out.split("\n\n")
    assert len(tables) == 2  # scores and notes
    assert tables[0].count("\n") == 1 + 2 + len(CONTROLS)
    assert b"random weights" in curve.read_bytes()
    assert run(main, "--model", finished_run, *flags, tmp_path / "export.json").status == 0
    of_run, of_export = (read_json(tmp_path / name)["scores"] for name in ("scores.json", "export.json"))
    assert list(of_run) == [f"{finished_run}{kind}" for kind in (", step 3", ", step 6", *CONTROLS)]
    assert of_run[f"{finished_run}, step 6"] == of_export[str(finished_run)]
    assert of_run[f"{finished_run}, step 3"] != of_export[str(finished_run)]
    controls = [f"{finished_run}{kind}" for kind in CONTROLS]
    assert [of_run[name] for name in controls] == [of_export[name] for name in controls]


def test_a_damaged_file_of_answers_is_named(tmp_path):
    for content in ('{"cut o', "[1]", '{"key": 5}', '{"key": {"sentences": []}}', '{"key": {"sentences": [[]]'):
        (tmp_path / "scores.answers.json").write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=r"--output: .*scores.answers.json must be a file of answers.*Delete it"):
            KeptAnswers(open_folder(str(tmp_path)), "scores.answers.json")
