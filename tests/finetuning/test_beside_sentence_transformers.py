"""Vectors, losses and gradients beside those of sentence-transformers, in environments with PyTorch."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from finetuning.data.inputs import INDEX, encode_texts, run_on_rows
from finetuning.data.texts import TextInputs, TextRows
from finetuning.tasks.embedding import Embedding, Encoder
from finetuning.tasks.pairs import SCORE, TEXT
from finetuning.tasks.vectors import TextEncoder, TextSearch
from tests.fixtures import module_forms
from tests.fixtures.module_forms import FORMS, write_form, write_plain
from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_models import one_layer_model, tiny_tokenizer
from train.layers.random_bits import row_keys
from train.publishing.publisher import write_task_files
from train.publishing.pytorch_format import ModelSnapshot, export_model, pytorch_weights, take_snapshot
from train.step.train_step import PretrainingModel

pytestmark = pytest.mark.slow

TEXTS = ["the name", "a function", "list of text in the model", "value"]
PASSAGES = ["the name is in the text", "a function returns the value", "the list", "the value of a name"]
NEGATIVES = ["a file", "text in the file is the name", "a model", "the text"]

ENCODER = """
import json, sys
from pathlib import Path
from sentence_transformers import SentenceTransformer

texts = json.loads(sys.argv[2])
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = SentenceTransformer(str(folder / "export"), device="cpu")
    queries, passages = model.encode_query(texts[0]), model.encode_document(texts[1])
    print(json.dumps([folder.name, queries.tolist(), passages.tolist(), model.similarity(queries, passages).tolist(),
                      model.max_seq_length]))
"""
PROMPTED = """
import json, sys
from sentence_transformers import SentenceTransformer

texts = json.loads(sys.argv[2])
for form, prompts in json.loads(sys.argv[3]).items():
    model = SentenceTransformer(f"{sys.argv[1]}/{form}", device="cpu")
    vectors = [model.encode(texts, prompt=prompt).tolist() for prompt in prompts]
    print(json.dumps([form, vectors, model.similarity(*vectors).tolist()]))
"""
LOSSES = """
import json, sys
import numpy as np, torch
from sentence_transformers import SentenceTransformer, losses

folder, out, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
columns, scores, dims = json.loads(sys.argv[4]), json.loads(sys.argv[5]), json.loads(sys.argv[6])
for name in names:
    model = SentenceTransformer(folder, device="cpu")
    model.eval()
    kind, _, matryoshka = name.partition("+")
    arguments = {"mini_batch_size": 2} if kind.startswith("Cached") else {}
    arguments |= {} if kind.startswith("Cosine") else {"scale": 20.0}
    loss = getattr(losses, kind)(model, **arguments)
    if matryoshka:
        loss = losses.MatryoshkaLoss(model, loss, dims)
    texts = columns[: 2 if "Symmetric" in kind or "Cosine" in kind else 3]
    features = [model.tokenize(column) for column in texts]
    value = loss(features, torch.tensor(scores))
    value.backward()
    named = (
        (key.removeprefix("0.auto_model.").removeprefix("0.model."), parameter)
        for key, parameter in model.named_parameters()
    )
    gradients = {key: parameter.grad.numpy() for key, parameter in named if parameter.grad is not None}
    np.savez(f"{out}/{name}.npz", loss=value.item(), **gradients)
"""
# {name in sentence-transformers: (settings, whether rows have scores, hard negatives and micro-batches)}
CASES: dict[str, tuple[dict[str, Any], bool, bool, int]] = {
    "MultipleNegativesRankingLoss": ({}, False, True, 1),
    "CachedMultipleNegativesRankingLoss": ({}, False, True, 2),
    "MultipleNegativesSymmetricRankingLoss": ({"symmetric_loss": True}, False, False, 1),
    "CachedMultipleNegativesSymmetricRankingLoss": ({"symmetric_loss": True}, False, False, 2),
    "MultipleNegativesRankingLoss+Matryoshka": ({"matryoshka_dims": [8, 16]}, False, True, 1),
    "CosineSimilarityLoss": ({}, True, False, 1),
}


def exported(folder: Path, name: str, pooling: str, dim: int | None = None) -> tuple[Any, Embedding]:
    """Write the export of an untrained model, and return its network and task."""
    tokenizer = tiny_tokenizer()
    network = one_layer_model(name, model_class="TFAutoModel")
    encoder = Encoder(pooling, network.config.hidden_size, dim, ("name: ", "text of "), 24)
    task = task_of(encoder, 1, name)
    network = task.adapt_network(network)
    export_model(network, tokenizer, str(folder / "export"), model_max_length=24, vocabulary_size=len(tokenizer))
    write_task_files(task.card, str(folder / "export"))
    return network, task


def task_of(encoder: Encoder, num_passages: int, name: str = "bert", **settings: Any) -> Embedding:
    has_scores = settings.pop("has_scores", False)
    given = {"temperature": 0.05, "symmetric_loss": False, "matryoshka_dims": [], **settings}
    return Embedding(
        encoder,
        num_passages,
        SimpleNamespace(**given),
        has_scores=has_scores,
        pad_token_id=1,
        token_types=name == "bert",
    )


def encoded(texts: list[str], *, token_types: bool) -> Any:
    return encode_texts(
        tiny_tokenizer(), (texts,), max_length=24, token_types=token_types, labels=np.zeros(len(texts), np.int32)
    )


def vectors_of(network: Any, task: Embedding, *, token_types: bool) -> list[np.ndarray]:
    """Compute the vectors of the texts as queries, and of the passages."""
    vectors = []
    for prompt, texts in zip(task.encoder.prompts, (TEXTS, PASSAGES), strict=True):
        rows = encoded([prompt + text for text in texts], token_types=token_types)
        kept = run_on_rows(partial(task.prediction_outputs, network), rows, task.prediction_features(24), (24,), 3)
        vectors.append(task.in_order(kept, "vector"))
    return vectors


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[np.ndarray]]]:
    """A folder of exports of several models and poolings, and {name: vectors of both kinds of texts}."""
    root, vectors = tmp_path_factory.mktemp("exports"), {}
    for name, pooling in (("bert", "mean"), ("roberta", "cls"), ("modernbert", "mean")):
        (root / f"{name}-{pooling}").mkdir()
        network, task = exported(root / f"{name}-{pooling}", name, pooling, dim=12 if pooling == "cls" else None)
        vectors[f"{name}-{pooling}"] = vectors_of(network, task, token_types=name == "bert")
    return root, vectors


def test_vectors_are_the_same(python, exports):
    root, vectors = exports
    lines = output_of(python, ENCODER, str(root), json.dumps([TEXTS, PASSAGES])).splitlines()
    read = {name: values for name, *values in map(json.loads, lines)}
    assert read.keys() == vectors.keys()
    for name, (queries, passages, similarities, max_length) in read.items():
        ours = vectors[name]
        np.testing.assert_allclose(queries, ours[0], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(passages, ours[1], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(similarities, ours[0] @ ours[1].T, atol=1e-5, err_msg=name)
        assert max_length == 24


def test_all_forms_of_modules_give_the_same_vectors(torch_python, tmp_path):
    """Also those that neither this project nor a default writes."""
    plain = write_plain(tmp_path / "plain")
    prompts = {form: of.get("expected_prompts", ("", "")) for form, of in FORMS.items()}
    for form in FORMS:
        write_form(plain, tmp_path / form, form)
    lines = output_of(torch_python, PROMPTED, str(tmp_path), json.dumps(module_forms.TEXTS), json.dumps(prompts))
    read = {form: outputs for form, *outputs in map(json.loads, lines.splitlines())}
    assert read.keys() == FORMS.keys()
    for form, (vectors, similarities) in read.items():
        encoder = TextEncoder.open(str(tmp_path / form))
        assert encoder.model.prompts == tuple(prompts[form])
        ours = [encoder.encode(module_forms.TEXTS, prompt, 2) for prompt in prompts[form]]
        np.testing.assert_allclose(ours, vectors, atol=1e-5, rtol=1e-5, err_msg=form)
        search = TextSearch(encoder, module_forms.TEXTS, ours[1], 2)
        for hits, expected in zip(search.find(module_forms.TEXTS), similarities, strict=True):
            by_text = dict(hits)
            np.testing.assert_allclose(
                [by_text[text] for text in module_forms.TEXTS], expected, rtol=1e-4, err_msg=form
            )


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory, torch_python: Path) -> Path:
    """The folder with an export, and sentence-transformers' losses and gradients of its model."""
    folder = tmp_path_factory.mktemp("losses")
    exported(folder, "bert", "mean")
    columns, scores = json.dumps([TEXTS, PASSAGES, NEGATIVES]), json.dumps([0.1, 0.9, 0.5, 0.0])
    width = one_layer_model("bert").config.hidden_size
    output_of(torch_python, LOSSES, str(folder / "export"), str(folder), json.dumps(list(CASES)), columns, scores,
              json.dumps([8, 16, width]))  # fmt: skip
    return folder


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_same(theirs, case):
    """Where the texts of a batch are encoded in two passes, by their lengths."""
    settings, has_scores, has_negatives, num_micro_batches = CASES[case]
    from train.model.from_pretrained import load_model

    network = load_model(str(theirs / "export"), "TFAutoModel")
    encoder = Encoder("mean", network.config.hidden_size, None, ("", ""), 24)
    num_passages = 2 if has_negatives else 1
    task = task_of(encoder, num_passages, has_scores=has_scores, **settings)
    queries = encoded(TEXTS, token_types=True)
    scores = np.array([0.1, 0.9, 0.5, 0.0], np.float32)
    of_rows = {INDEX: queries.row_values[INDEX], TEXT: np.arange(4, dtype=np.int32), SCORE: scores}
    passages = encoded(PASSAGES + NEGATIVES, token_types=True)
    members = np.arange(8, dtype=np.int32).reshape(2, 4).T[:, :num_passages]
    rows = TextRows(queries.starts, queries.token_values, of_rows, passages, members)
    inputs = TextInputs(rows, None, tiny_tokenizer(), "", (4, 24), {})
    batches = inputs.training_batches(
        task.features(24), tf.distribute.InputContext(), seed=1, global_batch_rows=4, start_step=0, num_steps=1
    )
    batch = next(iter(batches))
    for layer in network.submodules:
        if isinstance(layer, tf.keras.layers.Dropout) or hasattr(layer, "rate"):
            layer.rate = 0.0
    model = PretrainingModel(network, task, seed=1, num_micro_batches=num_micro_batches)
    model.compile(optimizer="sgd")
    gradients, sums = model._gradients(batch, row_keys((1, 1, 0), 4, 0))
    read = np.load(theirs / f"{case}.npz")
    num_rows = float(sums["num_rows"])
    np.testing.assert_allclose(float(sums["loss"]) / num_rows, read["loss"], atol=1e-5, rtol=1e-5)
    snapshot = take_snapshot(network)
    arrays = {
        variable.name: gradient.numpy() / num_rows
        for variable, gradient in zip(network.trainable_variables, gradients, strict=True)
    }
    weights = pytorch_weights(ModelSnapshot(snapshot.class_name, snapshot.config, arrays))
    ours = {name.removeprefix("bert."): array for name, array in weights.items()}
    compared = [name for name in read.files if name != "loss"]
    assert len(compared) > 10
    for name in compared:
        np.testing.assert_allclose(ours[name], read[name], atol=1e-5, err_msg=name)
    assert max(np.abs(read[name]).max() for name in compared) > 1e-3
