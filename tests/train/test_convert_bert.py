"""Google's checkpoints, written by these tests, become what the export makes of the same model, bit for bit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer, BertTokenizerFast

from tests.fixtures.arrays import assert_same_arrays
from tests.fixtures.google_checkpoints import (
    IDS,
    WORDPIECES,
    Variables,
    google_settings,
    google_variables,
    write_google_checkpoint,
    write_variables,
)
from tests.fixtures.other_environments import output_of
from tests.fixtures.results import read_json
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_models import padded_batch, tiny_model
from train.convert_bert import main
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import pytorch_weights


@pytest.fixture(scope="module")
def albert() -> Any:
    return tiny_model("albert with two groups", "TFAutoModelForPreTraining", **IDS)


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_a_training_checkpoint_becomes_an_export(name, tmp_path, request, run):
    model = request.getfixturevalue(name)
    variables = google_variables(model, with_slots=True)
    source = write_google_checkpoint(tmp_path / f"uncased_{name}", variables, google_settings(model.config))
    assert run(main, source, tmp_path / "out").status == 0
    assert_same_arrays(load_file(tmp_path / "out" / "model.safetensors"), pytorch_weights(model))
    config = read_json(tmp_path / "out" / "config.json")
    assert (config["model_type"], config["architectures"]) == (name, [f"{name.capitalize()}ForPreTraining"])
    # Without the head for pairs, as --init-from of a masked language model reads it.
    batch, _ = padded_batch(model)
    np.testing.assert_allclose(load_model(str(tmp_path / "out"))(batch).logits, model(batch)[0], atol=1e-6)


@pytest.mark.parametrize("lower", [True, False])
def test_the_tokenizer_is_googles(lower, bert, bert_variables, tmp_path, run):
    source = write_google_checkpoint(tmp_path / "a", bert_variables, google_settings(bert.config))
    assert run(main, source, tmp_path / "out", f"--{'' if lower else 'no-'}do-lower-case").status == 0
    text = "The Ä of A functionx, returns 天 the"
    googles = BertTokenizerFast.from_pretrained(source, do_lower_case=lower)
    for loaded in (AutoTokenizer, BertTokenizerFast):
        tokenizer = loaded.from_pretrained(tmp_path / "out")
        assert tokenizer(text, "a")["input_ids"] == googles(text, "a")["input_ids"]
        assert tokenizer(text, "a")["token_type_ids"] == googles(text, "a")["token_type_ids"]
        assert tokenizer.model_max_length == bert.config.max_position_embeddings
    assert ("Ä" in googles.tokenize(text)) is not lower


def test_a_zip_and_a_folder_in_the_cloud(bert, bert_variables, tmp_path, cloud, run):
    source = write_google_checkpoint(tmp_path / "cased_L-2", bert_variables, google_settings(bert.config))
    assert run(main, source, tmp_path / "out").status == 0
    expected = contents(tmp_path / "out")
    archive = Path(shutil.make_archive(str(tmp_path / "zipped"), "zip", tmp_path, "cased_L-2"))
    cloud.put(f"zips/{archive.name}", archive.read_bytes())
    for path in source.iterdir():
        cloud.put(f"models/cased_L-2/{path.name}", path.read_bytes())
    url = cloud.bucket_url
    places = (str(archive), f"{url}/zips/{archive.name}", f"{url}/models/cased_L-2", f"{source}/bert_model.ckpt")
    for number, place in enumerate(places):
        assert run(main, place, f"{url}/out-{number}").status == 0
        objects = cloud.objects()
        assert {name: objects[f"out-{number}/{name}"] for name in expected} == expected


def test_the_newest_checkpoint_of_a_training(bert, bert_variables, tmp_path, run):
    source = write_google_checkpoint(tmp_path / "cased", bert_variables, google_settings(bert.config))
    bias = np.array([5, 6], np.float32)
    write_variables(source / "model.ckpt-20", bert_variables | {"cls/seq_relationship/output_bias": bias})
    assert "has bert_model.ckpt, model.ckpt-20. Pass the path" in run(main, source, tmp_path / "out").refusal
    (source / "checkpoint").write_text(
        'model_checkpoint_path: "/tpu/model.ckpt-20"\nall_model_checkpoint_paths: "a"\n', encoding="utf-8"
    )
    assert run(main, source, tmp_path / "out").status == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(weights["cls.seq_relationship.bias"], bias)


def test_heads_that_are_not_there(bert, bert_variables, tmp_path, run):
    """A model without the one for pairs, from TF Hub; one that was fine-tuned."""
    no_pairs = {f"module/{name}": value for name, value in bert_variables.items() if "seq_relationship" not in name}
    encoder = {name: value for name, value in bert_variables.items() if name.startswith("bert/")}
    fine_tuned = encoder | {"output_weights": np.ones((3, 32), "f"), "output_bias": np.ones(3, "f")}
    for name, variables in (("BertForMaskedLM", no_pairs), ("BertModel", fine_tuned)):
        source = write_google_checkpoint(tmp_path / f"cased_{name}", variables, google_settings(bert.config))
        outcome = run(main, source, tmp_path / name)
        assert outcome.status == 0
        assert read_json(tmp_path / name / "config.json")["architectures"] == [name]
        weights = load_file(tmp_path / name / "model.safetensors")
        assert {key.split(".")[0] for key in weights} == ({"bert", "cls"} if "Masked" in name else {"bert"})
    assert "not converted, because they belong to other heads: output_bias, output_weights" in outcome.out


def without(name: str) -> Callable[[Variables], Variables]:
    return lambda variables: {key: value for key, value in variables.items() if key != name}


CUT = "cls/predictions/transform/dense/kernel"
WRONG = [
    (without(CUT), {}, WORDPIECES, rf"missing: {CUT}\.$"),
    (lambda all_of_it: all_of_it | {"bert/extra": np.ones(3, "f")}, {}, WORDPIECES, r"unknown: bert/extra\.$"),
    (None, {"max_position_embeddings": 64}, WORDPIECES, r"position_embeddings \(32, 32\), not \(64, 32\)\.$"),
    (None, {"hidden_act": "linear"}, WORDPIECES, "received linear. Set hidden_act to gelu in .*bert_config.json"),
    (None, {"num_attention_heads": 5}, WORDPIECES, "num_attention_heads must divide hidden_size"),
    (None, {}, WORDPIECES[:-1], "must have 200 tokens, as the configuration says; .* has 199"),
    (None, {}, ["a", *WORDPIECES[1:]], r"must contain \[PAD\]; "),
    (lambda _: {"electra/embeddings/word_embeddings": np.ones(3, "f")}, {}, WORDPIECES, "contains electra/embeddings"),
    (lambda _: {"_CHECKPOINTABLE_OBJECT_GRAPH": np.array("x")}, {}, WORDPIECES, "cased must be a checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "settings", "vocabulary", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_files_that_do_not_fit_each_other_are_refused(
    change, settings, vocabulary, message, bert, bert_variables, tmp_path, run
):
    folder = tmp_path / "cased"
    write_google_checkpoint(
        folder,
        change(bert_variables) if change else bert_variables,
        google_settings(bert.config) | settings,
        vocabulary,
    )
    assert re.search(rf"^error: .*{message}", run(main, folder, tmp_path / "out").refusal)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(("start", "end"), [("", "\r"), ("\ufeff", "\t ")])
def test_a_vocabulary_with_a_byte_order_mark_or_white_space_at_the_ends_of_lines(
    start, end, bert, bert_variables, tmp_path, run
):
    """Google's code strips each line, and of equal ones the last counts."""
    words = [f"{wordpiece}{end}" for wordpiece in WORDPIECES]
    words[0] = start + words[0]
    words[-1] = "the"
    write_google_checkpoint(tmp_path / "uncased", bert_variables, google_settings(bert.config), words)
    assert run(main, tmp_path / "uncased", tmp_path / "out").status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("the function", add_special_tokens=True) == ["[CLS]", "the", "function", "[SEP]"]
    assert tokenizer.convert_tokens_to_ids("the") == len(words) - 1
    assert len(tokenizer) == len(words)


def test_files_that_are_missing_or_damaged_are_refused(bert, bert_variables, tmp_path, run):
    source = write_google_checkpoint(tmp_path / "model", bert_variables, google_settings(bert.config))
    (source / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "broken.zip").write_bytes(b"PK")
    index, data = (source / f"bert_model.ckpt.{end}" for end in ("index", "data-00000-of-00001"))
    config = ("--bert-config", source / "bert_config.json")
    cases = [
        ((tmp_path / "nothing",), "there is no .*nothing.index"),
        ((tmp_path / "broken.zip",), "must be a complete .zip"),
        ((source,), "it has bert_config.json, config.json. Name the file with --bert-config"),
        ((source, "--bert-config", source / "vocab.txt"), "--bert-config: .*vocab.txt must be a file of JSON; "),
        ((source, *config), "Pass --do-lower-case or --no-do-lower-case"),
        ((source, *config, "--do-lower-case", "--vocabulary", "v.txt"), "--vocabulary must name an existing file"),
    ]
    for (place, *flags), message in cases:
        assert re.search(message, run(main, place, tmp_path / "out", *flags).refusal)
    for path in (data, index):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        refused = run(main, source, tmp_path / "out", *config, "--do-lower-case")
        assert "must be a checkpoint whose files are all complete" in refused.refusal
    assert not list((tmp_path / "out").glob("*"))


# Loads Google's checkpoints by transformers' own functions, which ask TensorFlow for the variables: here what stands in
# its place, with the arrays that it has read.
READER = """
import json, sys, types
from pathlib import Path
import numpy as np
import torch
import transformers
from transformers.models.albert.modeling_albert import load_tf_weights_in_albert
from transformers.models.bert.modeling_bert import load_tf_weights_in_bert

for folder in sorted(Path(sys.argv[1]).iterdir()):
    variables = dict(np.load(folder / "variables.npz"))
    train = types.SimpleNamespace(
        list_variables=lambda path: [(name, array.shape) for name, array in variables.items()],
        load_variable=lambda path, name: variables[name],
    )
    sys.modules["tensorflow"] = types.SimpleNamespace(train=train)
    model, loading = transformers.AutoModelForPreTraining.from_pretrained(folder / "out", output_loading_info=True)
    read = load_tf_weights_in_albert if model.config.model_type == "albert" else load_tf_weights_in_bert
    expected = read(type(model)(model.config), model.config, str(folder))
    expected.tie_weights()
    theirs, own = expected.state_dict(), model.state_dict()
    wrong = [name for name in theirs if not torch.equal(theirs[name], own[name])]
    sys.__stdout__.write("RESULT " + json.dumps({
        "class": type(model).__name__,
        "num_weights": len(theirs),
        "wrong": wrong,
        "keys": {kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys},
    }) + "\\n")
"""


@pytest.mark.slow
def test_it_equals_transformers_own_conversion(bert, albert, torch_python, tmp_path, run):
    """Which needs torch; transformers 5 has dropped it."""
    import tensorflow as tf

    for name, model in (("bert", bert), ("albert", albert)):
        variables = google_variables(model, with_slots=True)
        source = write_google_checkpoint(tmp_path / "cased" / name, variables, google_settings(model.config))
        folder = tmp_path / "read" / name
        assert run(main, source, folder / "out", "--no-do-lower-case").status == 0
        reader = tf.train.load_checkpoint(str(source / "bert_model.ckpt"))
        np.savez(folder / "variables.npz", **{key: reader.get_tensor(key) for key in variables})
    printed = output_of(torch_python, READER, str(tmp_path / "read"))
    results = [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]
    assert [result["class"] for result in results] == ["AlbertForPreTraining", "BertForPreTraining"]
    for result in results:
        assert (result["num_weights"] > 40, result["wrong"], result["keys"]) == (True, [], {})
