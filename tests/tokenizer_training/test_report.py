"""How a tokenizer is measured and reported on."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from matplotlib.text import Text
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.tokenizer import BYTE_TOKENS, SPECIAL_TOKENS
from tokenizer_training.fit import measure_fits
from tokenizer_training.report import (
    TokenizerQuality,
    build_report,
    draw_report,
    measure_quality,
    render_report,
    verdict,
)

WORDS = ["▁the", "▁model", "▁reads", "▁text"]
CHARACTERS = sorted(set("".join(SPECIAL_TOKENS.values())) | set("▁fixhmortw的"))
TEXTS = [
    *(f"the model reads text number {index} of the text, then it waits\nfor the next\tone " * 3 for index in range(8)),
    "",
    "的模型" * 60,
    "the " + "long" * 40,
]
COUNTS = {"z": 50, "▁": 40, "é": 3, "ü": 4, "모": 3, "\u200b": 1, "的": 9}
INPUT = {"num_documents": 1234, "num_bytes": 56789, "sampled": {"share": 0.25, "limit": None}}


def make_tokenizer(byte_fallback: bool = False) -> PreTrainedTokenizerFast:
    names = [*SPECIAL_TOKENS.values(), *(BYTE_TOKENS if byte_fallback else ())]
    scored = [(name, -100.0) for name in names] + [(piece, -2.0) for piece in [*CHARACTERS, *WORDS]]
    backend = Tokenizer(models.Unigram([*scored, ("<unused0>", -100.0)], unk_id=3, byte_fallback=byte_fallback))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["[EXTRA]"]})
    return tokenizer


def make_report(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, Any]:
    return build_report(tokenizer, measure_quality(tokenizer, texts), "validation", texts, COUNTS, INPUT)


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_quality(byte_fallback):
    # ▁the ▁text x, ▁the ▁ f i x and either <unk> or four bytes, ▁ x
    quality = measure_quality(make_tokenizer(byte_fallback), ["the textx", "the ﬁxéü  x"])
    num_tokens = 14 if byte_fallback else 11
    expected = TokenizerQuality(
        num_texts=2,
        num_bytes=9 + 15,
        num_words=5,
        num_characters=20,
        num_tokens=num_tokens,
        unknown_rate=0 if byte_fallback else 1 / num_tokens,
        unknown_character_rate=0 if byte_fallback else 2 / 17,
        byte_rate=4 / num_tokens if byte_fallback else 0,
        tokens_per_word=num_tokens / 5,
        bytes_per_token=24 / num_tokens,
        characters_per_token=20 / num_tokens,
    )
    assert asdict(quality) == pytest.approx(asdict(expected))


def test_special_tokens_in_text_are_text():
    quality = measure_quality(make_tokenizer(), ["<unk>[MASK]", "[SEP]"])
    assert quality.unknown_rate == quality.unknown_character_rate == 0
    assert quality.num_tokens == len("▁<unk>[MASK]▁[SEP]")


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_without_text_there_are_no_figures_but_a_report(texts):
    tokenizer = make_tokenizer()
    report = make_report(tokenizer, texts)
    held_out = report["held_out"]
    assert held_out["tokens_per_word"] == held_out["unknown_rate"] == held_out["num_words"] == 0
    assert report["examples"] == []
    assert render_report(report)
    assert draw_report(report, tokenizer, texts)


def test_pieces_and_characters():
    report = make_report(make_tokenizer(byte_fallback=True), TEXTS)
    assert report["pieces"] == {
        "num_special": 6,
        "num_byte": 256,
        "num_unused": 1,
        "num_single_character": len(CHARACTERS),
        "num_other": len(WORDS),
    }
    assert report["vocabulary_size"] == sum(report["pieces"].values())
    assert report["input"] == INPUT
    assert report["characters"] == {
        "num_kept": 2,
        "num_dropped": 5,
        "coverage": pytest.approx(1 - 61 / 110),
        "most_frequent_dropped": [["z", 50], ["ü", 4], ["é", 3], ["모", 3], ["\u200b", 1]],
    }
    assert report["longest_pieces"][:4] == ["▁model", "▁reads", "▁text", "▁the"]
    assert len(report["longest_pieces"]) == 20
    assert report["held_out"]["part"] == "validation"
    assert report["held_out"]["byte_rate"] > 0
    assert json.loads(json.dumps(report)) == report


CHINESE = ["的模型" * 60, "模型的" * 50]


def report_of_sources(tokenizer: PreTrainedTokenizerFast, sources: dict[str, list[str]]) -> dict[str, Any]:
    texts = [text for of_source in sources.values() for text in of_source]
    quality, fits = measure_quality(tokenizer, texts), measure_fits(tokenizer, sources)
    return build_report(tokenizer, quality, "all sources", texts, COUNTS, INPUT, fits)


@pytest.fixture
def drawn(monkeypatch) -> list[str]:
    """The texts of the picture that is drawn last."""
    texts: list[str] = []

    def image(figure: Any, *_: Any) -> bytes:
        texts[:] = [text.get_text() for text in figure.findobj(Text) if text.get_text()]
        return b""

    monkeypatch.setattr("tokenizer_training.report.image_of", image)
    return texts


def test_the_picture_has_a_figure_of_each_source_by_its_script(drawn):
    tokenizer = make_tokenizer()
    report = report_of_sources(tokenizer, {"en": TEXTS[:8], "zh": CHINESE})
    draw_report(report, tokenizer, [*TEXTS[:8], *CHINESE])
    en, zh = measure_quality(tokenizer, TEXTS[:8]), measure_quality(tokenizer, CHINESE)
    for words in ("en", f"{en.tokens_per_word:.2f}", "tokens per word", verdict(en.tokens_per_word)):
        assert drawn.count(words) == 1
    for words in ("zh", f"{zh.characters_per_token:.2f}", "characters per token", "few spaces between words"):
        assert drawn.count(words) == 1
    assert "measured on all sources text" in drawn


def test_the_picture():
    """It leaves the tokenizer as it was."""
    tokenizer = make_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    report = make_report(tokenizer, TEXTS)
    image = draw_report(report, tokenizer, TEXTS)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert draw_report(report, tokenizer, ["the model waits"]) != image
    # Without spaces, without a font, and with a word that is longer than a line.
    for texts in (["的模型" * 60], ["\U00013000" * 40 + "."], ["word" * 50]):
        assert draw_report(make_report(tokenizer, texts), tokenizer, texts)
    assert tokenizer.backend_tokenizer.to_str() == before
