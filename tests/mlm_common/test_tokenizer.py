"""The tokenizer as an artefact: loading, saving, its hash, and which of its tokens begin a word."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.tokenizer import (
    BYTE_TOKENS,
    SPECIAL_TOKENS,
    WORD_STARTS_FILE,
    load_tokenizer,
    load_word_starts,
    plain_text_tokenizer_json,
    save_tokenizer,
    special_ids,
    tokenizer_sha256,
    vocabulary_size,
    word_starts,
)
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import tiny_tokenizer
from tokenizer_training.report import plain_text_backend

WORDS = ["the", "model", "reads", "text"]


def make_tokenizer(scores: list[float] | None = None, **names: Any) -> PreTrainedTokenizerFast:
    scores = scores or [-1.5, -2.123456789012345, -3.1, -1 / 3]
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS.values()]
    pieces += [(f"▁{word}", score) for word, score in zip(WORDS, scores, strict=True)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    all_names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()} | names
    return PreTrainedTokenizerFast(tokenizer_object=backend, **all_names)


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path | str) -> PreTrainedTokenizerFast:
    save_tokenizer(tokenizer, str(folder))
    return load_tokenizer(str(folder))


def test_hash_is_stable_through_saving_and_truncation(tmp_path):
    tokenizer = make_tokenizer()
    sha256 = tokenizer_sha256(tokenizer)
    tokenizer(["the model", "text"], truncation=True, max_length=1, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_sha256(tokenizer) == sha256
    for number in range(3):
        tokenizer = saved(tokenizer, tmp_path / str(number))
        assert tokenizer_sha256(tokenizer) == sha256
        assert tokenizer.backend_tokenizer.truncation is None


def test_hash_survives_the_library_changing_a_last_bit():
    scores = [-2.1234567890123452, -13.786306381225586, -1 / 3, -9.87654321]
    tokenizer = make_tokenizer(scores)
    reread = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        **{f"{name}_token": token for name, token in SPECIAL_TOKENS.items()},
    )
    assert tokenizer_sha256(reread) == tokenizer_sha256(tokenizer)


def test_hash_tells_tokenizers_apart():
    lowercased = make_tokenizer()
    lowercased.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    extended = make_tokenizer()
    extended.add_tokens(["new"])
    tokenizers = [
        make_tokenizer(),
        make_tokenizer([-1.5, -2.1, -3.1, -1.0]),
        make_tokenizer(mask_token="<unk>"),
        lowercased,
        extended,
    ]
    assert max(Counter(map(tokenizer_sha256, tokenizers)).values()) == 1


@pytest.mark.parametrize("missing", SPECIAL_TOKENS)
def test_tokenizer_without_a_special_token_is_refused(missing, tmp_path):
    save_tokenizer(make_tokenizer(**{f"{missing}_token": None}), str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path} lacks {missing}"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("name", "other"), list(itertools.combinations(SPECIAL_TOKENS, 2)))
def test_special_tokens_that_share_an_id_are_refused(name, other, tmp_path):
    save_tokenizer(make_tokenizer(**{f"{name}_token": SPECIAL_TOKENS[other]}), str(tmp_path))
    with pytest.raises(InputError, match=rf"five different tokens .* in {tmp_path} {name} and {other} are both id \d"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), needs_special_tokens=False).is_fast


def test_a_vocabulary_with_a_byte_order_mark_is_refused(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8-sig")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    with pytest.raises(InputError, match=r"vocab\.txt must start with a token; it starts with a byte-order mark"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    assert special_ids(load_tokenizer(str(tmp_path))) == {"cls": 2, "pad": 0, "sep": 3, "unk": 1, "mask": 4}


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}), encoding="utf-8")
    with pytest.raises(InputError, match=rf"There is no tokenizer in {tmp_path}: it has no tokenizer\.json\.$"):
        load_tokenizer(str(tmp_path))
    save_tokenizer(make_tokenizer(), str(tmp_path / "export"))
    with pytest.raises(InputError, match=rf"no tokenizer\.json; did you mean {tmp_path}/export\?$"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"a"', encoding="utf-8")
    with pytest.raises(InputError, match=rf"{tmp_path}/tokenizer\.json must be a file of a tokenizer; Expecting ':'"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match=r"There is no folder .*missing"):
        load_tokenizer(str(tmp_path / "missing"))


SPECIALS = list(SPECIAL_TOKENS.values())


def wrapped(model: Any, pre_tokenizer: Any = None, decoder: Any = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def unigram(*pieces: str, byte_fallback: bool = False) -> models.Unigram:
    scored = [(token, -100.0) for token in SPECIALS] + [(piece, -1.0) for piece in pieces]
    return models.Unigram(scored, unk_id=3, byte_fallback=byte_fallback)


def bpe(*pieces: str, **settings: Any) -> models.BPE:
    return models.BPE({piece: index for index, piece in enumerate([*SPECIALS, *pieces])}, [], **settings)


def starting(tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Find the pieces that begin a word, the special tokens left out."""
    starts = word_starts(tokenizer)
    assert starts is not None
    assert (starts.dtype, starts.shape) == (np.bool_, (vocabulary_size(tokenizer),))
    return {piece for piece, token_id in tokenizer.get_vocab().items() if starts[token_id]} - set(SPECIALS)


def test_metaspace():
    pieces = ["▁", "▁the", "the", "o▁f", "▁▁", *BYTE_TOKENS]
    split = pre_tokenizers.Metaspace()
    for pre_tokenizer in (split, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])):
        tokenizer = wrapped(unigram(*pieces, byte_fallback=True), pre_tokenizer)
        assert starting(tokenizer) == {"▁", "▁the", "▁▁"}
    assert starting(wrapped(unigram("_the", "▁the"), pre_tokenizers.Metaspace(replacement="_"))) == {"_the"}
    of_the_decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    assert starting(wrapped(bpe("▁the", "the"), decoder=of_the_decoder)) == {"▁the"}


def test_byte_level():
    pieces = ["Ġ", "Ġthe", "the", "Ċ", "ĊĊ", "ĉ", "Ã", "ł"]  # the last is a byte of other characters
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits_first = pre_tokenizers.Sequence([pre_tokenizers.Digits(), level])
    for pre_tokenizer in (level, digits_first):
        assert starting(wrapped(bpe(*pieces), pre_tokenizer)) == {"Ġ", "Ġthe", "Ċ", "ĊĊ", "ĉ"}


@pytest.mark.parametrize("prefix", ["##", "@@"])
def test_prefix_of_continued_words(prefix):
    vocabulary = {piece: index for index, piece in enumerate([*SPECIALS, "the", f"{prefix}s", "#", "é"])}
    word_piece = models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=prefix)
    tokenizer = wrapped(word_piece, pre_tokenizers.BertPreTokenizer())
    assert starting(tokenizer) == {"the", "#", "é"}
    starts = word_starts(tokenizer)
    assert starts is not None
    assert starts[3]  # in WordPiece the unknown token stands for a whole word
    assert starting(wrapped(bpe("the", f"{prefix}s", continuing_subword_prefix=prefix))) == {"the"}


def test_tokenizers_without_marks_have_no_table():
    words = models.WordLevel({token: index for index, token in enumerate([*SPECIALS, "the"])}, unk_token="<unk>")
    without = [
        wrapped(words, pre_tokenizers.Whitespace()),
        wrapped(bpe("the</w>", "the", end_of_word_suffix="</w>"), pre_tokenizers.Whitespace()),
        wrapped(unigram("the"), pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])),
        wrapped(bpe("the", *BYTE_TOKENS, continuing_subword_prefix="##", byte_fallback=True)),
    ]
    assert [word_starts(tokenizer) for tokenizer in without] == [None] * len(without)


def test_special_tokens_and_ids_without_a_token():
    tokenizer = wrapped(unigram("▁", "the"), pre_tokenizers.Metaspace())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[EXTRA]"]})
    tokenizer.add_tokens(["ordinary"])
    starts = word_starts(tokenizer)
    assert starts is not None
    # The unknown token comes after a mark where it begins a word.
    assert starts.tolist() == [True, True, True, False, True, True, False, True, False]
    assert tokenizer.convert_ids_to_tokens([5, 6, 7, 8]) == ["▁", "the", "[EXTRA]", "ordinary"]
    without_lone_mark = word_starts(wrapped(unigram("▁the"), pre_tokenizers.Metaspace()))
    assert without_lone_mark is not None
    assert without_lone_mark.all()

    ids = {token: index for index, token in enumerate([*SPECIALS, "▁the"])} | {"▁a": 8}
    starts = word_starts(wrapped(models.BPE(ids, [], unk_token="<unk>"), pre_tokenizers.Metaspace()))
    assert starts is not None
    assert starts.tolist() == [True] * 6 + [False, False, True]


def marked_tokenizer(byte_fallback: bool, split_digits: bool) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one space between words, which are marked at their begin, as stage 1 makes them."""
    characters = sorted(set("".join(SPECIALS)) | set("▁abcdeé12的"))  # special tokens in plain text can be spelled
    pieces = [*characters, "▁a", "▁b", "cd", "▁abc", "12", "中的", *(BYTE_TOKENS if byte_fallback else ())]
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = wrapped(
        unigram(*pieces, byte_fallback=byte_fallback),
        pre_tokenizers.Sequence([metaspace, digits]) if split_digits else metaspace,
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"[\s▁]+"), " "), normalizers.Strip(left=False, right=True)]
    )
    return tokenizer


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("split_digits", [True, False])
def test_each_word_of_a_text_begins_once(byte_fallback, split_digits):
    tokenizer = marked_tokenizer(byte_fallback, split_digits)
    backend, starts = plain_text_backend(tokenizer), word_starts(tokenizer)
    assert starts is not None
    characters = st.one_of(st.sampled_from("abcdé12 \n\u3000▁的中<>ﬁx"), st.characters(exclude_categories=["Cs"]))

    @given(st.text(characters))
    @settings(max_examples=80)
    def check(text: str) -> None:
        normalized = backend.normalizer.normalize_str(text)
        words = [word for word in normalized.split(" ") if word]
        ids = backend.encode(text).ids
        assert starts[ids].sum() == len(words)
        assert starts[ids[:1]].all()

    check()


@pytest.mark.parametrize("place", ["local", "cloud"])
def test_saved_with_its_table(place, cloud, tmp_path):
    """The table of an earlier tokenizer does not stay."""
    folder = f"{cloud.bucket_url}/tokenizer" if place == "cloud" else str(tmp_path)
    tokenizer = tiny_tokenizer()
    assert tokenizer_sha256(saved(tokenizer, folder)) == tokenizer_sha256(tokenizer)
    np.testing.assert_array_equal(load_word_starts(folder), word_starts(tokenizer))
    save_tokenizer(wrapped(unigram("the")), folder)
    assert load_word_starts(folder) is None


def test_damaged_table_is_refused(tmp_path):
    path = tmp_path / WORD_STARTS_FILE
    for data in (b"", b"not an array"):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{path} must be one truth value per id, .* Delete it, or save"):
            load_word_starts(str(tmp_path))
    for array in (np.zeros(4), np.zeros((2, 2), np.bool_)):
        np.save(path, array)
        with pytest.raises(InputError, match=f"it contains {array.dtype} values of shape"):
            load_word_starts(str(tmp_path))


TEXTS = ["a <unk> b [MASK] c [MASK]s the cat"] * 500


def trained_bpe(**prefix: str) -> Tokenizer:
    """Train on text that spells special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **prefix))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIALS, show_progress=False, **prefix)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.mark.parametrize("has_old_merges", [False, True])
@pytest.mark.parametrize("prefix", ["", "##"])
def test_merges_that_make_a_special_token_are_left_out(prefix, has_old_merges):
    tokenizer = trained_bpe(**{"continuing_subword_prefix": prefix} if prefix else {})
    content = json.loads(tokenizer.to_str())
    made = {left + right[len(prefix) :] for left, right in content["model"]["merges"]}
    assert {"<unk>", "[MASK]", "[MASK]s"} <= made, "the case of this test"
    if has_old_merges:
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    plain = Tokenizer.from_str(plain_text_tokenizer_json(json.dumps(content)))
    assert plain.encode("the cat a b c").ids == tokenizer.encode("the cat a b c").ids
    special_ids = {tokenizer.token_to_id(token) for token in SPECIALS} - {tokenizer.token_to_id("<unk>")}
    for text in ("[MASK]", "a [MASK]s", "[MASK][MASK] <unk>"):
        ids = plain.encode(text).ids
        assert ids
        assert special_ids.isdisjoint(ids)


def test_a_tokenizer_that_cannot_be_changed_is_refused():
    content = json.loads(trained_bpe().to_str())
    content["model"]["merges"].append(["no", "such"])
    with pytest.raises(
        InputError, match=r"may produce the special tokens of the tokenizer \(<pad>, .*`no` out of vocab"
    ):
        plain_text_tokenizer_json(json.dumps(content))


def test_what_transformers_5_has_saved_is_loaded_and_saved_for_both(tmp_path):
    tokenizer = make_tokenizer()
    save_tokenizer(tokenizer, str(tmp_path))
    config_path, roles_path = tmp_path / "tokenizer_config.json", tmp_path / "special_tokens_map.json"
    config, roles = read_json(config_path), read_json(roles_path)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert roles == {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    of_5 = {name: value for name, value in config.items() if name != "added_tokens_decoder"}
    of_5 |= {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": True}
    config_path.write_text(json.dumps(of_5), encoding="utf-8")
    roles_path.unlink()
    loaded = load_tokenizer(str(tmp_path))
    assert (tokenizer_sha256(loaded), special_ids(loaded)) == (tokenizer_sha256(tokenizer), special_ids(tokenizer))
    save_tokenizer(loaded, str(tmp_path / "again"))
    again = read_json(tmp_path / "again" / "tokenizer_config.json")
    assert again["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"backend", "is_local"} & again.keys()
    assert read_json(tmp_path / "again" / "special_tokens_map.json").keys() == roles.keys()


def test_tokens_without_a_role_have_the_name_that_both_versions_know(tmp_path):
    tokenizer = make_tokenizer(additional_special_tokens=["[ENT]"])
    save_tokenizer(tokenizer, str(tmp_path))
    config = read_json(tmp_path / "tokenizer_config.json")
    assert config["additional_special_tokens"] == ["[ENT]"]
    assert not config.get("extra_special_tokens")
    assert "[ENT]" in load_tokenizer(str(tmp_path)).all_special_tokens
