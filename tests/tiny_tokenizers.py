"""Tiny tokenizers of the kinds that people pretrain with, trained in a moment on two sentences."""

import functools
import io

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenizer_training.normalization import NormalizationConfig, make_normalizer, make_pre_tokenizer

SPECIAL_TOKENS = ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
TEXTS = ["a model of language, masked", "the MASK [of] <the> language model CLS SEP unk pad ] [ < > é ं 12"] * 20


def unigram() -> Tokenizer:
    """The kind that train-unigram makes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = make_normalizer(NormalizationConfig())
    tokenizer.pre_tokenizer = make_pre_tokenizer(NormalizationConfig(split_digits=True))
    return _trained_unigram(tokenizer)


def lowercased() -> Tokenizer:
    """The same with other settings."""
    config = NormalizationConfig(normalization="none", lowercase=True, strip_accents=True)
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = make_normalizer(config), make_pre_tokenizer(config)
    return _trained_unigram(tokenizer)


def albert() -> Tokenizer:
    """A unigram model behind SentencePiece's own normalization, as in ALBERT, T5 and XLM-RoBERTa."""
    tokenizer = Tokenizer(models.Unigram())
    steps = [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Precompiled(sentencepiece_character_map()), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return _trained_unigram(tokenizer)


def marks_every_space() -> Tokenizer:
    """A unigram model that sees each space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return _trained_unigram(tokenizer)


def wordpiece() -> Tokenizer:
    """BERT's kind, with tokens that were added later."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["[LATE]"])
    tokenizer.add_tokens([AddedToken("ordinary", normalized=True)])
    return tokenizer


def byte_level() -> Tokenizer:
    """The kind of GPT-2 and RoBERTa."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def whole_text() -> Tokenizer:
    """A unigram model that cuts a text as a whole, whose pieces may span words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return _trained_unigram(tokenizer)


def words() -> Tokenizer:
    """A word an id."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, "language", "model"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


@functools.cache
def sentencepiece_character_map() -> bytes:
    """Return the compiled rules of nmt_nfkc_cf, which SentencePiece keeps in its models."""
    import sentencepiece
    from transformers.utils import sentencepiece_model_pb2_new

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc_cf",
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2_new.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto.normalizer_spec.precompiled_charsmap


def _trained_unigram(tokenizer: Tokenizer) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


_MAKERS = (unigram, lowercased, albert, marks_every_space, wordpiece, byte_level, words, whole_text)
KINDS = {make.__name__: make for make in _MAKERS}
