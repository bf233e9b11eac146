"""Exports, cards, scores and trackers in environments with other packages: PyTorch, transformers 4 and 5, trackers."""

import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.fixtures.arrays import logits_of
from tests.fixtures.generated_text import generated_lines
from tests.fixtures.made_once import made_once
from tests.fixtures.other_environments import PROJECT, output_of
from tests.fixtures.read_in_pytorch import TOLERANCE, read_in_pytorch, write_expected
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_models import CONFIGS, VOCABULARY, is_computed_here, padded_batch, tiny_model, tiny_tokenizer
from tests.fixtures.tiny_run import run_flags
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from tokenizer_training.train_unigram import main as train_tokenizer
from train.fill_mask import fill_masks
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.run_mlm import main as run_mlm
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.scoring.answers import QueriedModel
from train.scoring.pairs import Pair
from train.scoring.queries import Asker, total_by_item

pytestmark = pytest.mark.slow

SENTENCES = ["a function returns the [MASK] of a file", "the [MASK]", "Text, with ünknown signs in 3 [MASK]."]
MODEL_MAX_LENGTH = 60
HEADS = ("SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering")
# Whose heads stand on what differs: a pooler, on nothing, on another width, on stacked layers.
MODELS_WITH_HEADS = ("albert", "bert", "distilbert", "mobilebert", "roberta")

# Prints what a tokenizer makes of texts and pairs of them, and which of its tokens are special.
TEXT_READER = """
import json, sys
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.loads(sys.argv[2])
ids = [tokenizer(text)["input_ids"] for text in texts]
print(json.dumps({
    "length": len(tokenizer),
    "ids": ids,
    "alone": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
    "pairs": dict(tokenizer(texts, texts[::-1], padding=True, truncation=True, max_length=40)),
    "decoded": [tokenizer.decode(row) for row in ids],
    "decoded_text": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
    "special": {name: getattr(tokenizer, name + "_token_id") for name in sys.argv[3].split()},
    "all_special": sorted(tokenizer.all_special_ids),
}))
"""
TEXTS = [
    "", " ", "kira dorna", "  Kira\tdorna\r\n\n", "kira [MASK]. [MASK]dorna[ENT]x [ENT] <pad>[SEP]", "[ENT][ENT][MASK]",
    "<0x41> <unused0> <unk>", "``so'' it's 2010, \uff21\uff22 \ufb01 e\u0301 \u00bd", "天地玄黃、カーン。한국어",
    "\U0001f469\u200d\U0001f469\U0001f600 \ufe0f", "▁▁a\ufeffb\x00c\x85d\xa0e\u2028f", "▅\u2047\ufffd\ufffe",
    "kira" * 50, "\u0301\u0327\u0301a \u0627\u0644\u0633 \u0939\u093f\u0928",
]  # fmt: skip
SPECIAL_IDS = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4, "bos": 0, "eos": 2}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A folder of exports of each architecture that is computed here, with its logits; and the ids of the sentences."""
    root = tmp_path_factory.mktemp("exports")
    tokenizer = tiny_tokenizer()
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="np")
    sentences = {name: encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask")}
    for name in filter(is_computed_here, CONFIGS):
        # An epsilon that is far from the defaults shows where a class does not read its configuration's.
        epsilon = "norm_eps" if "modernbert" in name else "layer_norm_eps"
        model = tiny_model(name, max_position_embeddings=MODEL_MAX_LENGTH + 2, **{epsilon: 0.05})
        random_batch, _ = padded_batch(model)
        folder = root / name.replace(" ", "_")
        export_model(model, tokenizer, str(folder), model_max_length=MODEL_MAX_LENGTH)
        expected = {"AutoModelForMaskedLM": lambda batch, model=model: logits_of(model(batch))}
        write_expected(folder, {"random": random_batch, "sentences": sentences}, expected)
    return root, encoded["input_ids"].tolist()


@pytest.fixture(scope="module")
def read_by(tmp_path_factory):
    """A function from an interpreter to what it makes of `TEXTS` by a trained tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_text("\n".join([*generated_lines(1000), "[ENT] 天地 [ENT]"]), encoding="utf-8")
    flags = ["--data-files", str(folder / "corpus.txt"), "--output-dir", str(folder / "out"), "--vocab-size", "600"]
    assert train_tokenizer([*flags, "--extra-special-tokens", "[ENT]", "--pad-vocab-to-multiple-of", "128"]) == 0
    arguments = (TEXT_READER, str(folder / "out"), json.dumps(TEXTS), " ".join(SPECIAL_IDS))
    return functools.cache(lambda interpreter: json.loads(output_of(interpreter, *arguments)))


def test_transformers_reads_a_trained_tokenizer_as_it_was_made(python, read_by):
    expected, actual = read_by(Path(sys.executable)), read_by(python)
    assert actual["length"] == 640
    assert actual["special"] == SPECIAL_IDS
    assert actual["all_special"] == [0, 1, 2, 3, 4, 5]
    assert [ids.count(5) for ids in actual["ids"]] == [text.count("[ENT]") for text in TEXTS]
    assert actual == expected


def test_transformers_on_torch_reads_every_export(python, exports):
    root, expected_ids = exports
    results = read_in_pytorch(python, root, SENTENCES)
    names = {path.name for path in root.iterdir()}
    assert {result["folder"] for result in results} == names >= {"bert", "modernbert", "roberta"}
    expected = {"dtype": "torch.float32", "wrong_keys": {}, "ids": expected_ids, "max_length": MODEL_MAX_LENGTH}
    for result in results:
        assert result["class"].endswith("ForMaskedLM"), result
        assert {name: result[name] for name in expected} == expected, result
        assert result["difference"] < TOLERANCE, result


def write_head(folder: Path, name: str, head: str, lengths: tuple[int, ...], **changes: Any) -> None:
    """Export a model with that head, with TensorFlow's outputs for rows of each of these lengths, some padded."""
    model = tiny_model(name, f"TFAutoModelFor{head}", **changes)
    export_model(model, tiny_tokenizer(), str(folder), model_max_length=max(lengths))
    batches = {}
    for length in lengths:
        attended = np.arange(length) < np.array([[length], [length // 2], [length - 7]])
        if head == "MultipleChoice":  # three choices of one row
            attended = attended[np.newaxis]
        ids = np.where(attended, np.random.default_rng(length).integers(5, VOCABULARY, attended.shape), 1)
        batches[str(length)] = {"input_ids": ids.astype(np.int32), "attention_mask": attended.astype(np.int32)}
    attentions = ("sdpa", "eager") if name == "modernbert" else (None,)
    write_expected(folder, batches, {f"AutoModelFor{head}": lambda batch: logits_of(model(batch))}, attentions)


@pytest.fixture(scope="module")
def long_modernberts(tmp_path_factory) -> Path:
    """A folder of exports of ModernBERTs with each head, all on rows longer than the window."""
    root = tmp_path_factory.mktemp("modernberts")
    for head in ("MaskedLM", *HEADS):
        layers = {"local_attention": 128, "num_hidden_layers": 3, "global_attn_every_n_layers": 3}
        lengths = (300, 1024) if head == "MaskedLM" else (300,)
        write_head(root / head, "modernbert", head, lengths, **layers, num_labels=2, classifier_pooling="mean")
    return root


def test_rows_of_a_modernbert_that_are_longer_than_its_window(python, long_modernberts):
    results = read_in_pytorch(python, long_modernberts)
    assert len(results) == 2 * (1 + len(HEADS))
    assert all(result["wrong_keys"] == {} and result["difference"] < TOLERANCE for result in results)


@pytest.fixture(scope="module")
def exports_with_heads(tmp_path_factory) -> Path:
    """A folder of exports of models of one layer with each of the heads of fine-tuning."""
    root = tmp_path_factory.mktemp("heads")
    for name, head in product(filter(is_computed_here, MODELS_WITH_HEADS), HEADS):
        one_layer = {"n_layers" if "n_layers" in CONFIGS[name] else "num_hidden_layers": 1}
        num_labels = 2 if head == "QuestionAnswering" else 3
        write_head(root / f"{name}-{head}", name, head, (12, 30), num_labels=num_labels, **one_layer)
    return root


def test_transformers_on_torch_reads_heads_of_fine_tuning(python, exports_with_heads):
    results = read_in_pytorch(python, exports_with_heads)
    assert len(results) == len(list(filter(is_computed_here, MODELS_WITH_HEADS))) * len(HEADS)
    assert all(result["wrong_keys"] == {} and result["difference"] < TOLERANCE for result in results)


REPO, BRANCH = "alice/tiny", "trial"
EXAMPLE = "a corpus of [MASK] words"


@pytest.mark.usefixtures("one_device", "eagerly")
def test_what_was_pushed_fills_masks_as_the_export_does(python, hub_here, shards, tmp_path):
    """From a branch of a private repository."""
    flags = ("--hub-model-id", REPO, "--hub-private", "--hub-revision", BRANCH, "--hub-example", EXAMPLE)
    flags += ("--max-steps", "1", "--eval-steps", "1")
    assert run_mlm(run_flags(shards, tmp_path / "run", *flags)) == 0
    card = hub_here.files(REPO, revision=BRANCH)["README.md"].decode()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    (expected,) = fill_masks(str(tmp_path / "run" / "export"), [EXAMPLE])
    assert len(expected) == 5
    lines = output_of(python, snippet, environment=hub_here.environment).splitlines()
    assert [line.split()[0] for line in lines] == [str(round(guess["score"], 3)) for guess in expected]
    assert [line.split(maxsplit=1)[1] for line in lines] == [guess["sequence"] for guess in expected]


SCORED_SENTENCES = ["the model of language", "a mask, the language models", "masked"]
# Prints the log-likelihoods of the sentences for each export and by each method, minicons' and a direct computation.
SCORER = """
import json, sys
from pathlib import Path
import torch
from minicons.scorer import MaskedLMScorer
from transformers import AutoModelForMaskedLM, AutoTokenizer

sentences = json.loads(sys.argv[2])

def direct(model, tokenizer, sentence):
    ids = torch.tensor(tokenizer(sentence)["input_ids"])
    total = 0.0
    for position in range(1, len(ids) - 1):
        masked = ids.clone()
        masked[position] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=masked[None]).logits[0, position]
        total += float(torch.log_softmax(logits, -1)[ids[position]])
    return total

for folder in sorted(Path(sys.argv[1]).iterdir()):
    scorer = MaskedLMScorer(str(folder), "cpu")
    by_token = lambda scores: scores.sum(0).item()
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    print(json.dumps({
        "name": folder.name,
        "direct": [direct(model, tokenizer, sentence) for sentence in sentences],
        "minicons": [scorer.sequence_score([sentence], reduction=by_token)[0] for sentence in sentences],
        "minicons, left to right": [
            scorer.sequence_score([sentence], reduction=by_token, PLL_metric="within_word_l2r")[0]
            for sentence in sentences
        ],
    }))
"""


def test_scores_are_those_of_minicons_and_pytorch(torch_python, tmp_path):
    ours = {}
    roles = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    for architecture, kind in (("bert", "wordpiece"), ("roberta", "byte_level"), ("modernbert", "unigram")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **roles)
        framed = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
        template = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=framed)
        tokenizer.backend_tokenizer.post_processor = template
        size = len(tokenizer)
        model = tiny_model(architecture, vocab_size=size, max_position_embeddings=62, pad_token_id=1)
        folder = tmp_path / "exports" / f"{architecture} {kind}"
        export_model(model, tokenizer, str(folder), model_max_length=60)
        network = load_model(str(folder))
        answering = QueriedModel(network, TensorFlowRuntime(tf.distribute.get_strategy()), size, 1)
        for left_to_right in (False, True):
            pairs = [Pair(sentence, "another one", "", "") for sentence in SCORED_SENTENCES]
            queries, _ = Asker(tokenizer, 60, left_to_right=left_to_right).about_pairs(pairs)
            nats = answering.answer(queries, [16, 24, 32, 60]).nats
            ours[folder.name, left_to_right] = -total_by_item(queries, nats, 2 * len(pairs))[::2]
    printed = output_of(torch_python, SCORER, str(tmp_path / "exports"), json.dumps(SCORED_SENTENCES)).splitlines()
    results = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(results) == len(ours) / 2
    for result in results:
        name = result["name"]
        np.testing.assert_allclose(ours[name, False], result["direct"], atol=1e-4, err_msg=name)
        np.testing.assert_allclose(ours[name, False], result["minicons"], atol=1e-4, err_msg=name)
        # Of text without punctuation: to minicons a comma is a word, here it belongs to the word before it.
        left_to_right = result["minicons, left to right"]
        for index in (0, 2):
            assert ours[name, True][index] == pytest.approx(left_to_right[index], abs=1e-4), name


TRACKERS = ("wandb", "mlflow", "trackio")
# Prints what the trackers have: for each run its status, settings and points, [figure, step, value].
TRACKERS_READER = """
import json, struct, sys
from pathlib import Path

def wandb_records(path):
    # LevelDB's log after 7 bytes: records in parts, in blocks of 32 KiB. wandb has no reader of its own files.
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""

found = {"wandb": {}, "mlflow": {}, "trackio": {}}
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")):
    one = found["wandb"].setdefault(path.stem, {"points": [], "settings": {}})
    for record in wandb_records(path):
        if record.HasField("run"):
            one["settings"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                one["points"].append([name, record.history.step.num, json.loads(item.value_json)])

from mlflow import MlflowClient
client = MlflowClient()
for run in client.search_runs([client.get_experiment_by_name("mlm-pretraining").experiment_id]):
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    points = [[point.key, point.step, point.value] for history in histories for point in history]
    found["mlflow"][run.info.run_name] = {"status": run.info.status, "settings": run.data.params, "points": points}

from trackio.sqlite_storage import SQLiteStorage
for name in SQLiteStorage.get_runs("mlm-pretraining"):
    logs = SQLiteStorage.get_logs("mlm-pretraining", name)
    points = [[key, log["step"], value] for log in logs for key, value in log.items() if "/" in key]
    found["trackio"][name] = {"points": points, "settings": SQLiteStorage.get_run_config("mlm-pretraining", name)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trackers_python(tmp_path_factory) -> Path:
    """The interpreter of an environment with the trackers' extras, and all that is installed here."""

    def make(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        installed = subprocess.run([python, "-c", purelib], check=True, capture_output=True, encoding="utf-8").stdout
        Path(installed.strip(), "this.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        declared = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
        extras = re.findall(rf'^(?:{"|".join(TRACKERS)}) = \["(.+)"\]$', declared, re.MULTILINE)
        installed_hub = f"huggingface-hub=={version('huggingface-hub')}"  # so that trackio suits it
        subprocess.run([python, "-m", "pip", "install", "--quiet", *extras, installed_hub], check=True)

    kept_in = os.environ.get("MLM_TEST_ENVIRONMENTS")
    return made_once(tmp_path_factory, "trackers", make, kept_in=kept_in) / "bin" / "python"


def test_a_resumed_run_is_one_run_of_each_tracker_with_each_step_once(trackers_python, shards, tmp_path):
    environment = {
        "PYTHONPATH": str(PROJECT),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }

    def train(*flags):
        command = [trackers_python, PROJECT / "train" / "run_mlm.py", *flags, "--report-to", *TRACKERS]
        done = subprocess.run(
            command, env=os.environ | environment, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stderr
        assert "is not up to date" not in done.stderr, done.stderr

    constant = ("--schedule", "constant", "--run-name", "tiny", "--keep-checkpoints", "1")
    for max_steps in (6, 10):
        train(*run_flags(shards, tmp_path / "run", *constant, "--max-steps", str(max_steps)))
        if max_steps == 6:  # a kill: the checkpoint of the last steps was not written
            for path in (tmp_path / "run" / "checkpoints").glob("step-00000006.*"):
                path.unlink()
    recorded = json.loads(
        output_of(trackers_python, TRACKERS_READER, str(tmp_path), environment=environment).splitlines()[-1]
    )
    lines = logged(tmp_path / "run")
    loss = {(f"{line['split']}/loss", line["step"]): pytest.approx(line["loss"]) for line in lines}
    assert set(loss) >= {("train/loss", 2), ("train/loss", 10), ("validation/loss", 6), ("validation/loss", 10)}
    for name in TRACKERS:
        (run,) = recorded[name].values()
        points = run["points"]
        assert len({(figure, step) for figure, step, _ in points}) == len(points), name
        assert {(figure, step): value for figure, step, value in points if figure.endswith("/loss")} == loss, name
        assert {figure for figure, _, _ in points} >= {"train/learning_rate", "validation/masked_accuracy"}, name
        assert str(run["settings"]["optimization.schedule"]) == "constant", name
    assert recorded["mlflow"]["tiny"]["status"] == "FINISHED"
