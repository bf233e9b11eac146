"""The programs that our trainer is compared with: `unigram-trainer` of `tokenizers`, and `sentencepiece`.

    python benchmarks/peers/tokenizer_peers.py sentencepiece text.txt 16000 model

Both programs read a text file with one paragraph per line. `unigram-trainer` does what transformers' TPU tutorial does,
preceded by NFKC as in SentencePiece; `sentencepiece` uses its default settings, but accepts paragraphs of any length.
"""

import argparse
from pathlib import Path

SPECIAL_TOKENS = ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
MAX_PARAGRAPH_BYTES = 1 << 20


def train_with_tokenizers(text_file: Path, vocab_size: int, output: Path) -> None:
    """Write a `tokenizer.json`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *quotes])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    with text_file.open(encoding="utf-8", newline="\n") as lines:
        tokenizer.train_from_iterator((line.rstrip("\n") for line in lines), trainer)
    tokenizer.save(str(output))


def train_with_sentencepiece(text_file: Path, vocab_size: int, output: Path) -> None:
    """Write a SentencePiece model."""
    from sentencepiece import SentencePieceTrainer

    with output.open("wb") as model:
        SentencePieceTrainer.train(
            input=str(text_file),
            model_writer=model,
            vocab_size=vocab_size,
            max_sentence_length=MAX_PARAGRAPH_BYTES,
            minloglevel=1,
        )


TRAINERS = {"unigram-trainer": train_with_tokenizers, "sentencepiece": train_with_sentencepiece}


def main() -> None:
    """Train a tokenizer with the trainer that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("text_file", type=Path)
    parser.add_argument("vocab_size", type=int)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    TRAINERS[arguments.trainer](arguments.text_file, arguments.vocab_size, arguments.output)


if __name__ == "__main__":
    main()
