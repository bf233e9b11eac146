"""Show what an exported model predicts at the [MASK] of each sentence, by transformers' own fill-mask pipeline."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlm_common.command_line import command, log_start, parse_arguments
from mlm_common.errors import InputError

# Before transformers is imported.
from mlm_common.settings import flag
from mlm_common.storage import open_folder
from train.config.settings import MASK

DEFAULT_SENTENCES = (
    "Return a [MASK] of strings.",
    "If the file does not exist, an [MASK] is raised.",
    "The first [MASK] is the name of the file.",
)
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")


@dataclass(frozen=True)
class FillMaskConfig:
    """Which model is asked what."""

    model: str = field(
        metadata={"help": "Folder of an exported model, local or gs:// (OUTPUT_DIR/export of run_mlm.py)."}
    )
    text: list[str] = field(
        default_factory=lambda: list(DEFAULT_SENTENCES),
        metadata={"help": "Sentences with one [MASK] each; by default three that suit a model of technical English."},
    )
    top_k: int = flag(5, "Predictions shown for each sentence, the likeliest first.")

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InputError(f"--top-k must be at least 1; received {self.top_k}.")


def fill_masks(folder: str, sentences: Sequence[str], top_k: int = 5) -> list[list[dict[str, Any]]]:
    """Predict for each sentence its `top_k` fillings, the likeliest first.

    Runs on torch where it is installed, else on TensorFlow.

    Args:
        folder: an exported model, local or `gs://`.
        sentences: each with one `[MASK]`, which stands for the tokenizer's mask token, whatever it looks like.
        top_k: at least 1, and no more than the vocabulary holds.

    Returns:
        Dicts with `score` (probability), `token` (id), `token_str` and `sequence` (the sentence filled in), as
        `transformers.FillMaskPipeline` gives them.

    Raises:
        InputError: the folder holds no exported model; a sentence has no mask, has several, or is longer than the
            model's rows; `top_k` is larger than the vocabulary.
    """
    with _local_export(folder) as local_folder:
        from tokenizer_training.tokenizer import load_tokenizer, vocabulary_size

        tokenizer = load_tokenizer(local_folder)
        if top_k > vocabulary_size(tokenizer):
            raise InputError(f"--top-k must be at most the vocabulary, {vocabulary_size(tokenizer)}; received {top_k}.")
        texts = [_with_mask_token(sentence, tokenizer) for sentence in sentences]
        fill = _pipeline(local_folder, tokenizer)
        return [fill(text, top_k=top_k) for text in texts]


@contextmanager
def _local_export(folder: str) -> Iterator[str]:
    export = open_folder(folder)
    missing = sorted(set(NEEDED_FILES) - set(export.list_files()))
    if missing:
        raise InputError(
            f"--model must be a folder with an exported model, as OUTPUT_DIR/export of run_mlm.py; {folder} lacks "
            f"{', '.join(missing)}."
        )
    with export.local_copy() as local_folder:
        yield str(Path(local_folder).resolve())


def _with_mask_token(sentence: str, tokenizer: Any) -> str:
    text = sentence.replace(MASK, tokenizer.mask_token)
    ids = tokenizer(text)["input_ids"]
    num_masks = ids.count(tokenizer.mask_token_id)
    if num_masks != 1:
        raise InputError(f"--text must hold one {MASK} a sentence; received {num_masks} in {sentence!r}.")
    if len(ids) > tokenizer.model_max_length:
        raise InputError(
            f"--text must fit the {tokenizer.model_max_length} tokens of the model's rows; received {len(ids)} tokens "
            f"in {sentence[:40]!r}…"
        )
    return text


def _pipeline(folder: str, tokenizer: Any) -> Any:
    from transformers import AutoModelForMaskedLM, FillMaskPipeline
    from transformers.utils import is_torch_available

    if is_torch_available():
        model = AutoModelForMaskedLM.from_pretrained(folder)
    else:
        from train.model.from_pretrained import load_model

        model = load_model(folder)
    # Not `pipeline("fill-mask", …)`: it needs torch even for a TensorFlow model.
    return FillMaskPipeline(model=model, tokenizer=tokenizer)


def predictions_table(sentence: str, predictions: Sequence[dict[str, Any]]) -> str:
    """Write the sentence and, in a line each, the probability in percent and the text of its predictions."""
    lines = [f"{prediction['score']:8.1%}  {prediction['token_str']}" for prediction in predictions]
    return "\n".join([sentence, *lines])


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the predictions for each sentence."""
    (config,) = parse_arguments((FillMaskConfig,), argv, __doc__ or "")
    log_start(__file__)
    for sentence, predictions in zip(config.text, fill_masks(config.model, config.text, config.top_k), strict=True):
        print(predictions_table(sentence, predictions), end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
