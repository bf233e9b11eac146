"""Each number of the command beside a direct computation, which masks each token and each word in a row of its own.

`test_other_environments.py` compares the network itself with PyTorch's.
"""

import math
import unicodedata

import numpy as np
import pytest
from scipy.special import logsumexp

from mlm_common.tokenizer import plain_text_tokenizer_json
from tests.fixtures.results import read_json, write_jsonl
from tests.fixtures.tiny_models import one_layer_model, tiny_tokenizer
from tests.train.scoring.test_texts import TOKENIZERS
from train.model.build import build_network
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.score_mlm import main

pytestmark = pytest.mark.usefixtures("eagerly")

NUM_NETWORKS = 2
UNK, MASK = 3, 4
DOCUMENTS = ["the of a function", "list zq value the the", "a [MASK] of model name", "is zж in"]
PAIRS = [
    ("the list is a value", "the list a value is", "syntax", "order"),
    ("a function returns", "function a returns", "syntax", "order"),
    ("the file is of text", "the file is of of", "semantics", "repetition"),
    ("a model", "a a", "semantics", "repetition"),
    ("the same", "the same", "semantics", "equal"),
]


class Direct:
    """Scores of one network, with each token and each word masked by itself."""

    def __init__(self, folder):
        self.network, self.tokenizer = load_model(str(folder)), tiny_tokenizer()
        self.plain = type(self.tokenizer.backend_tokenizer).from_str(
            plain_text_tokenizer_json(self.tokenizer.backend_tokenizer.to_str())
        )
        self.num_ids = len(self.tokenizer)

    def tokens(self, text):
        """Return the ids and what each token is of the text; an unknown one is the character itself."""
        encoding = self.plain.encode(text, add_special_tokens=False)
        return encoding.ids, [token.removeprefix("▁") for token in encoding.tokens]

    def masked(self, ids, *masks):
        """Compute log-probabilities of all ids at all tokens, in a row for each mask."""
        rows = np.full((len(masks), len(ids) + 2), [0, *ids, 2])
        for row, places in zip(rows, masks, strict=True):
            row[np.array(places) + 1] = MASK
        logits = self.network({"input_ids": rows}).logits.numpy()[:, 1:-1, : self.num_ids].astype(float)
        return logits - logsumexp(logits, axis=-1, keepdims=True)

    def nats(self, text):
        ids, _ = self.tokens(text)
        masked = self.masked(ids, *([place] for place in range(len(ids))))
        return np.array([-masked[place, place, token_id] for place, token_id in enumerate(ids)])

    def units(self):
        """Return (bits, bytes, rank of the worst token) of each word, which in these texts are cut by spaces."""
        units = []
        for document in DOCUMENTS:
            (ids, tokens), nats = self.tokens(document), self.nats(document)
            place = 0
            for number, word in enumerate(document.split()):
                stop = place + len(self.tokens(word)[0])
                asked = [index for index in range(place, stop) if tokens[index].isalnum()]
                (log_probabilities,) = self.masked(ids, asked)
                ranks = [
                    int((log_probabilities[index] > log_probabilities[index, ids[index]]).sum()) for index in asked
                ]
                is_unknown = any(ids[index] == UNK for index in asked)
                spelled = sum(len(tokens[index].encode()) for index in range(place, stop) if ids[index] == UNK)
                bits = nats[place:stop].sum() / math.log(2) + 8 * spelled
                units.append((bits, len(word.encode()) + (number > 0), 10**9 if is_unknown else max(ranks)))
                place = stop
            assert place == len(ids)
        return np.array(units).T

    def preferred(self):
        values = []
        for good, bad, *_ in PAIRS:
            difference = self.nats(bad).sum() - self.nats(good).sum()
            values.append(0.5 if good == bad else float(difference > 0))
        return np.array(values)


def expected_scores(folder):
    direct = Direct(folder)
    preferred = direct.preferred()
    bits, num_bytes, ranks = direct.units()
    value = bits.sum() / num_bytes.sum()
    return {
        "bits per byte": (value, (bits - value * num_bytes) / num_bytes.mean()),
        "words, 1st guess": (np.mean(ranks < 1), (ranks < 1) - np.mean(ranks < 1)),
        "words, 5 guesses": (np.mean(ranks < 5), (ranks < 5) - np.mean(ranks < 5)),
        "pairs": (preferred.mean(), preferred - preferred.mean()),
    }


def error_of(errors, measure):
    usual = np.std(errors, ddof=1) / math.sqrt(len(errors))
    return usual if measure == "bits per byte" else max(usual, 1.96 / 2 / (len(errors) + 1.96**2))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two models, the second of which knows some words of the texts, in folders of their own."""
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = tiny_tokenizer()
    for name in ("first", "second"):
        model = one_layer_model("roberta", max_position_embeddings=62)
        if name == "second":
            bias = model.bias.numpy()
            bias[tokenizer.convert_tokens_to_ids(["▁the", "▁of", "▁a"])] += 5
            model.bias.assign(bias)
        export_model(model, tokenizer, str(folder / name), model_max_length=60)
    return folder


@pytest.mark.slow
def test_all_numbers_are_those_of_a_direct_computation(exported, run, tmp_path):
    text, pairs = tmp_path / "text.txt", tmp_path / "pairs.jsonl"
    text.write_text("".join(f"{document}\n" for document in DOCUMENTS), encoding="utf-8")
    names = ("sentence_good", "sentence_bad", "field", "linguistics_term")
    write_jsonl(pairs, *(dict(zip(names, pair, strict=True)) for pair in PAIRS))
    models = [str(exported / name) for name in ("first", "second")]
    flags = ("--text", text, "--sample-by", "line", "--minimal-pairs", pairs, "--random-networks", NUM_NETWORKS)
    outcome = run(main, "--model", *models, *flags, "--output", tmp_path / "scores.json")
    assert outcome.status == 0, outcome.err
    content = read_json(tmp_path / "scores.json")
    scores = content["scores"]
    expected = {model: expected_scores(exported / model.rpartition("/")[2]) for model in models}
    for model in models:
        for measure, (value, errors) in expected[model].items():
            assert scores[model][measure]["value"] == pytest.approx(value, abs=1e-5), measure
            assert scores[model][measure]["standard_error"] == pytest.approx(error_of(errors, measure), abs=1e-5)
            assert f"{value:.3f} ± {error_of(errors, measure):.3f}" in outcome.out
        for kind, column in (("field", 2), ("term", 3)):
            for part in {pair[column] for pair in PAIRS}:
                preferred = expected[model]["pairs"][0] + expected[model]["pairs"][1]
                mean = np.mean([score for score, pair in zip(preferred, PAIRS, strict=True) if pair[column] == part])
                assert scores[model][f"pairs, by {kind}"][part]["value"] == pytest.approx(mean)
        assert content["models"][0]["unknown_tokens"] == pytest.approx(3 / 27)
    assert content["equal_pairs"] == 1
    assert "pairs of two equal sentences: 1, each" in outcome.out
    networks = []
    for seed in range(NUM_NETWORKS):
        config = one_layer_model("roberta", max_position_embeddings=62).config
        network = build_network(config, vocabulary_size=len(tiny_tokenizer()), seed=seed)
        export_model(network, tiny_tokenizer(), str(tmp_path / f"random {seed}"), model_max_length=60)
        networks.append(expected_scores(tmp_path / f"random {seed}"))
    smallest = {measure: 1.96 / 2 / (len(errors) + 1.96**2) for measure, (_, errors) in networks[0].items()}
    smallest["bits per byte"] = 0.0
    spreads = {}
    for measure, least in smallest.items():
        values = [network[measure][0] for network in networks]
        spreads[measure] = np.mean(values), max(np.std(values, ddof=1), least)
        of_random = scores[f"{models[0]}, random weights"][measure]
        assert (of_random["value"], of_random["standard_error"]) == pytest.approx(spreads[measure], abs=1e-5)


UGLY = (
    "the 語学の漢字。é e\u0301 ﬁn 年月年月x 😀 हिन्दी भाषा ภาษาไทย",
    "the [MASK] <unk> שָׁלוֹם" + unicodedata.normalize("NFD", "한국어 Größe"),
    "a\u200bb\u00ad \u0007x 𓀀𓀀𓀀 the model of language",
)


@pytest.mark.slow
def test_bits_per_byte_are_those_of_each_token_once_for_any_tokenizers(run, tmp_path):
    """Beside a sum over the tokens of the whole text, of the guess without context, which needs no network."""
    write_jsonl(tmp_path / "text.jsonl", *({"text": text} for text in UGLY))
    models = {}
    for name in ("byte fallback", "all bytes", "wordpiece"):
        tokenizer = TOKENIZERS[name]
        folder = str(tmp_path / name.replace(" ", "_"))
        model = one_layer_model("roberta", vocab_size=len(tokenizer), max_position_embeddings=62)
        export_model(model, tokenizer, folder, model_max_length=60)
        models[folder] = name
    flags = ("--text", tmp_path / "text.jsonl", "--random-networks", "2", "--output", tmp_path / "scores.json")
    outcome = run(main, "--model", *models, *flags)
    assert outcome.status == 0, outcome.err
    scores = read_json(tmp_path / "scores.json")["scores"]
    items = {scores[folder]["bits per byte"]["items"] for folder in models}
    assert len(items) == 1  # the same units for all
    for folder, name in models.items():
        backend = TOKENIZERS[name].backend_tokenizer
        plain = type(backend).from_str(plain_text_tokenizer_json(backend.to_str()))
        ids = np.concatenate([plain.encode(text, add_special_tokens=False).ids for text in UGLY]).astype(int)
        frequencies = np.bincount(ids) / len(ids)
        bits = -np.log2(frequencies[ids]).sum()
        of_none = scores[f"{folder}, no context"]["bits per byte"]["value"]
        num_bytes = sum(len(text.encode()) for text in UGLY)
        unknown = (ids == TOKENIZERS[name].unk_token_id).sum()
        share = f"{folder}: {100 * unknown / len(ids):.1f}% of the text's tokens are <unk>"
        assert (share in outcome.out) == (unknown > 0)
        if unknown:  # each costs its spelling, too
            assert of_none > (bits + 8 * unknown) / num_bytes
        else:
            assert of_none == pytest.approx(bits / num_bytes)


def test_what_a_tokenizer_cannot_read_makes_no_model_look_good(run, tmp_path):
    (tmp_path / "text.txt").write_text("語学と日本の歴史はとても長いです\n" * 3, encoding="utf-8")
    export_model(
        one_layer_model("roberta", max_position_embeddings=62),
        tiny_tokenizer(),
        str(tmp_path / "m"),
        model_max_length=60,
    )
    flags = ("--text", tmp_path / "text.txt", "--random-networks", "2", "--output", tmp_path / "scores.json")
    outcome = run(main, "--model", tmp_path / "m", *flags)
    content = read_json(tmp_path / "scores.json")
    for name in content["scores"].values():
        assert name["bits per byte"]["value"] >= 8
        assert name["words, 5 guesses"]["value"] == 0
    assert content["models"][0]["unread_bytes"] == pytest.approx(1)
    assert "50.0% of the text's tokens are <unk>; 100.0% of its bytes cannot be read" in outcome.out


@pytest.mark.slow
def test_networks_that_know_nothing_differ_from_random_weights_in_at_most_one_of_twenty(run, tmp_path):
    """Networks of other seeds than the control's; each is compared with that, and with all before it."""
    tokenizer, config = tiny_tokenizer(), one_layer_model("roberta", max_position_embeddings=62).config
    random = np.random.default_rng(5)
    words = [token[1:] for token in tokenizer.get_vocab() if token.startswith("▁") and len(token) > 1]
    pairs = []
    for _ in range(200):  # a word is replaced: a network has its preferences among words, right or wrong
        good = random.choice(words, 5)
        bad = good.copy()
        bad[random.integers(5)] = random.choice(words)
        pairs.append({"sentence_good": " ".join(good), "sentence_bad": " ".join(bad)})
    write_jsonl(tmp_path / "pairs.jsonl", *pairs)
    models = []
    for seed in range(100, 114):
        models.append(str(tmp_path / str(seed)))
        network = build_network(config, vocabulary_size=len(tokenizer), seed=seed)
        export_model(network, tokenizer, models[-1], model_max_length=60)
    flags = ("--minimal-pairs", tmp_path / "pairs.jsonl", "--output", tmp_path / "scores.json")
    outcome = run(main, "--model", *models, *flags)
    assert outcome.status == 0, outcome.err
    content = read_json(tmp_path / "scores.json")
    control = content["scores"][f"{models[0]}, random weights"]["pairs"]
    values = [content["scores"][model]["pairs"]["value"] for model in models]
    assert np.std(values, ddof=1) < 2 * control["standard_error"]  # the error is that of another network
    beside_control = [
        difference["differs"] for difference in content["differences"] if difference["from"].endswith("random weights")
    ]
    beside_others = [difference["differs"] for difference in content["differences"] if difference["from"] in models]
    assert (len(beside_control), len(beside_others)) == (14, 91)
    assert sum(beside_control) <= 1
    assert np.mean(beside_others) <= 0.05
