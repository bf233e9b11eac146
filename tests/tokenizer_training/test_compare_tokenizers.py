"""Figures of tokenizers side by side, of which the right ones can be counted by hand."""

import json

from tokenizers import decoders, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS, TEXTS
from tokenizer_training.compare_tokenizers import main
from tokenizer_training.report import measure_quality

DECODERS = {"unigram": decoders.Metaspace(), "wordpiece": decoders.WordPiece(), "byte_level": decoders.ByteLevel()}


def test_figures_of_each_tokenizer_by_file(run, tmp_path):
    roles = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    tokenizers = {}
    for kind, decoder in DECODERS.items():
        # The last has no special tokens, as GPT-2's.
        of_kind = {} if kind == "byte_level" else roles
        backend = KINDS[kind]()
        backend.decoder = decoder
        if kind == "byte_level":  # with all bytes
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
            backend.train_from_iterator(TEXTS, trainer)
        tokenizers[str(tmp_path / kind)] = PreTrainedTokenizerFast(tokenizer_object=backend, **of_kind)
        tokenizers[str(tmp_path / kind)].save_pretrained(tmp_path / kind)
    texts = {"plain.txt": "the model of language", "other.txt": "The model 語 language"}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    files = [tmp_path / name for name in texts]
    outcome = run(main, *tokenizers, "--data-files", *files, "--output", tmp_path / "figures.json")
    assert outcome.status == 0, outcome.err
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert list(figures) == [str(file) for file in files]
    for file, text in zip(files, texts.values(), strict=True):
        assert f"{file}, 4 words:" in outcome.out
        for name, tokenizer in tokenizers.items():
            measured = measure_quality(tokenizer, [text])
            assert figures[str(file)][name]["tokens_per_word"] == measured.tokens_per_word
            assert figures[str(file)][name]["unknown_rate"] == measured.unknown_rate
    unigram, wordpiece, byte_level = tokenizers
    plain, other = figures.values()
    assert [plain[name]["lost_word_rate"] for name in tokenizers] == [0, 0, 0]
    assert other[unigram]["lost_word_rate"] == 0.5  # T and 語 are unknown
    assert other[wordpiece]["lost_word_rate"] == 0.5  # 語 is unknown, and The is lowercased
    assert other[byte_level]["lost_word_rate"] == 0
    assert other[byte_level]["byte_rate"] * other[byte_level]["num_tokens"] == 3  # of 語
    assert plain[byte_level]["byte_rate"] == 0


def test_bad_input_is_one_line(run, tmp_path):
    assert "none" in run(main, tmp_path / "none", "--data-files", __file__).refusal
    refused = run(main, tmp_path, "--data-files", "*.txt", "--output", "table.csv").refusal
    assert "--output must end in .json; received table.csv" in refused
