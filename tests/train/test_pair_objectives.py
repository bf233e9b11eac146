"""Runs that learn from pairs: trained, evaluated and exported, for all classes that the file is for."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.fixtures.arrays import logits_of
from tests.fixtures.read_in_pytorch import TOLERANCE, read_in_pytorch, write_expected
from tests.fixtures.results import read_json
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_models import (
    is_computed_here,
    of_transformers_4,
    padded_batch,
    tiny_model,
    tiny_tokenizer,
)
from tests.fixtures.tiny_pairs import BERT
from tests.fixtures.tiny_run import MODEL, NUM_STEPS, run_flags
from train.export import main as export
from train.fill_mask import fill_masks
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.run_mlm import main

BOTH_HEADS = {"cls.seq_relationship.weight", "bert.pooler.dense.weight", "cls.predictions.bias"}


def test_it_is_evaluated(pair_run):
    lines = logged(pair_run)
    for line in lines:
        assert line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"], rel=1e-3)
        assert 0 <= line["nsp_accuracy"] <= 1
        assert line["perplexity"] == pytest.approx(np.exp(line["mlm_loss"]))
    last = lines[-1]
    assert (last["split"], last["step"]) == ("validation", NUM_STEPS)
    totals = read_json(pair_run / "run.json")["eval_data"]["totals"]
    assert last["num_pairs"] == totals["num_rows"] > totals["num_random_pairs"] > 0
    card = (pair_run / "export" / "README.md").read_text(encoding="utf-8")
    assert "accuracy, next sentence" in card
    assert f"{last['num_pairs']:,} pairs. The loss is the sum of both." in card


def test_its_file_is_for_all_classes(pair_run, tmp_path):
    folder = pair_run / "export"
    assert read_json(folder / "config.json")["architectures"] == ["BertForPreTraining"]
    assert load_file(folder / "model.safetensors").keys() > BOTH_HEADS
    ids = {"input_ids": np.random.default_rng(0).integers(5, 40, (2, 12), dtype=np.int32)}
    both = load_model(str(folder), "TFAutoModelForPreTraining")(ids)
    np.testing.assert_allclose(load_model(str(folder))(ids).logits, both.prediction_logits, atol=1e-6)
    assert len(fill_masks(str(folder), ["a [MASK] of"])[0]) == 5
    # A folder is exported again with all its heads.
    assert export([str(folder), str(tmp_path)]) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
@of_transformers_4
@pytest.mark.usefixtures("one_device", "eagerly")
def test_an_albert_continues_with_the_order_of_sentences(pair_shards, tmp_path):
    config = {"model_type": "albert", "embedding_size": 16, "num_hidden_groups": 1, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = ("--pretrained-model-config", str(tmp_path), "--config-overrides", MODEL, "--objective", "mlm+sop")
    steps = ("--max-steps", "2", "--eval-steps", "2", "--log-steps", "1")
    assert main(run_flags(pair_shards, tmp_path / "run", *model, *steps)) == 0
    assert {"sop_loss", "sop_accuracy", "num_pairs"} <= logged(tmp_path / "run")[-1].keys()
    continued = ("--init-from", str(tmp_path / "run" / "export"), "--objective", "mlm+sop")
    assert main(run_flags(pair_shards, tmp_path / "more", *continued, "--dry-run")) == 0
    weights = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert {"sop_classifier.classifier.weight", "albert.pooler.weight"} <= weights.keys()


@pytest.mark.parametrize(
    ("folder", "extra_flags", "message"),
    [
        ("shards", BERT, "--objective mlm+nsp needs shards made with --chunking segment_pairs; the chunking of"),
        ("pair_shards", (), "--objective mlm+nsp needs one of albert, bert, mobilebert; the model is a roberta"),
        ("pair_shards", (*BERT, "--config-overrides", f"{MODEL},type_vocab_size=1"), "distinguishes two segments"),
        ("pair_shards", (*BERT, "--block-attention"), "--block-attention needs shards in which"),
    ],
)
def test_what_has_no_pairs_is_refused(folder, extra_flags, message, tmp_path, request, run):
    shards = request.getfixturevalue(folder)
    flags = run_flags(shards, tmp_path / "run", *extra_flags, "--objective", "mlm+nsp", "--dry-run")
    assert message in run(main, *flags).refusal


@pytest.mark.slow
def test_transformers_on_torch_reads_all_heads(python, tmp_path):
    num_classes = {"Bert": 4, "Albert": 3, "MobileBert": 4}
    num_classes = {prefix: number for prefix, number in num_classes.items() if is_computed_here(prefix.lower())}
    for prefix in num_classes:
        model = tiny_model(prefix.lower(), "TFAutoModelForPreTraining")
        export_model(model, tiny_tokenizer(), str(tmp_path / prefix), model_max_length=30)
        batch, attended = padded_batch(model)
        batch["token_type_ids"] = (attended & (np.arange(12) > 5)).astype(np.int32)
        heads = {
            "ForPreTraining": lambda rows, model=model: logits_of(model(rows)),
            "ForMaskedLM": lambda rows, model=model: logits_of(model(rows))[:1],
            "ForNextSentencePrediction": lambda rows, model=model: logits_of(model(rows))[1:],
            "ForSequenceClassification": None,
        }
        if prefix == "Albert":
            del heads["ForNextSentencePrediction"]
        write_expected(
            tmp_path / prefix, {"pairs": batch}, {f"{prefix}{head}": compute for head, compute in heads.items()}
        )
    results = read_in_pytorch(python, tmp_path)
    assert len(results) == sum(num_classes.values())
    for result in results:
        is_classifier = result["asked"].endswith("ForSequenceClassification")
        missing = ["classifier.bias", "classifier.weight"] if is_classifier else []
        assert result["wrong_keys"].get("missing_keys", []) == missing
        assert result["difference"] < TOLERANCE
