"""Show what a masked language model predicts at the [MASK] of each sentence.

Examples:
    python train/fill_mask.py --model work/model --text "Er ging in das [MASK]."
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import Bounded, flag
from mlm_common.errors import InputError
from mlm_common.storage import check_folder_or_hub, local_or_hub
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import load_tokenizer, vocabulary_size
from train import load_tensorflow
from train.config.settings import MASK
from train.runtime.run_folder import exported_model

logger = logging.getLogger(__name__)

DEFAULT_SENTENCES = (
    "Return a [MASK] of strings.",
    "If the file does not exist, an [MASK] is raised.",
    "The first [MASK] is the name of the file.",
)


@dataclass(frozen=True)
class FillMaskConfig(Bounded):
    """The model, and the sentences with masks to fill in."""

    FLAG_GROUP = "Model and sentences"

    model: str = field(
        metadata={
            "help": "Folder of a run (OUTPUT_DIR of run_mlm.py) or of an exported model, local or gs://, or a model on "
            "the Hub.",
            "metavar": "DIR",
        }
    )
    text: list[str] = field(
        default_factory=lambda: list(DEFAULT_SENTENCES),
        metadata={
            "help": "Sentences with one [MASK] each. Default: three for a model of technical English.",
            "metavar": "SENTENCE",
        },
    )
    top_k: int = flag(5, "Number of predictions per sentence, the most likely first.", at_least=1)


def fill_masks(folder: str, sentences: Sequence[str], top_k: int = 5) -> list[list[dict[str, Any]]]:
    """Predict the `top_k` most likely tokens for the one `[MASK]` of each sentence.

    Runs on PyTorch if it is installed, otherwise on TensorFlow.

    Args:
        folder: a run or an exported model, local or `gs://`; or the id of a model on the Hub.
        sentences: each contains `[MASK]` exactly once.
        top_k: number of predictions per sentence.

    Returns:
        For each sentence, the predictions as dicts of `transformers.FillMaskPipeline`, the most likely first.

    Raises:
        InputError: the model cannot be read, or a sentence does not contain exactly one `[MASK]` or is too long.
    """
    with _loadable(folder) as local_folder:
        tokenizer = load_tokenizer(local_folder)
        if top_k > vocabulary_size(tokenizer):
            size = vocabulary_size(tokenizer)
            raise InputError(f"--top-k must be at most {size}, the size of the vocabulary; received {top_k}.")
        texts = [_with_mask_token(sentence, tokenizer) for sentence in sentences]
        from transformers.utils import is_torch_available

        if is_torch_available():  # PyTorch is slow to import, so bad input is rejected first
            logger.info("Loading PyTorch …")
            from transformers import AutoModelForMaskedLM, FillMaskPipeline

            with guarded_read(local_folder, "the folder of a masked language model"):
                model = AutoModelForMaskedLM.from_pretrained(local_folder)
            # `pipeline("fill-mask", local_folder)` would load the model outside `guarded_read`.
            fill = FillMaskPipeline(model=model, tokenizer=tokenizer)
        else:
            load_tensorflow()
            from train.model.from_pretrained import load_model

            model = load_model(local_folder)
            fill = partial(_fill, model, tokenizer)
        largest_id = max(max(tokenizer(text)["input_ids"]) for text in texts)
        if largest_id >= model.config.vocab_size:
            raise InputError(
                f"The tokenizer in {folder} does not belong to the model: the model has {model.config.vocab_size} ids, "
                f"and the tokenizer gives the id {largest_id}."
            )
        return [fill(text, top_k=top_k) for text in texts]


def _fill(model: Any, tokenizer: Any, text: str, top_k: int) -> list[dict[str, Any]]:
    """Compute the results of FillMaskPipeline with a TensorFlow model."""
    import tensorflow as tf

    encoded = tokenizer(text)
    logits = model({name: tf.constant([ids]) for name, ids in encoded.items()}, training=False)[0][0]  # (length, ids)
    ids = encoded["input_ids"]
    position = ids.index(tokenizer.mask_token_id)
    scores, tokens = tf.math.top_k(tf.nn.softmax(tf.cast(logits[position], tf.float32)), top_k)
    return [
        {
            "score": score,
            "token": token,
            "token_str": tokenizer.decode([token]),
            "sequence": tokenizer.decode([*ids[:position], token, *ids[position + 1 :]], skip_special_tokens=True),
        }
        for score, token in zip(scores.numpy().tolist(), tokens.numpy().tolist(), strict=True)
    ]


@contextmanager
def _loadable(folder: str) -> Iterator[str]:
    """Yield the local folder or Hub id to load the model from, once its configuration and weights are checked."""
    check_folder_or_hub(folder, "--model")
    with local_or_hub(exported_model(folder)) as name:
        from train.model.pretrained_files import find_weights, read_masked_lm_config

        read_masked_lm_config(name, folder)
        find_weights(name)
        yield name


def _with_mask_token(sentence: str, tokenizer: Any) -> str:
    text = sentence.replace(MASK, tokenizer.mask_token)
    ids = tokenizer(text)["input_ids"]
    num_masks = ids.count(tokenizer.mask_token_id)
    if num_masks != 1:
        raise InputError(f"Each sentence needs exactly one {MASK}; {sentence!r} has {num_masks or 'none'}.")
    if len(ids) > tokenizer.model_max_length:
        raise InputError(
            f"The model reads at most {tokenizer.model_max_length} tokens; {sentence[:40]!r}… has {len(ids)}. Shorten "
            "the sentence."
        )
    return text


@command
def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_arguments((FillMaskConfig,), argv, __doc__, needed=("model",))
    log_start(__file__)
    for sentence, predictions in zip(config.text, fill_masks(config.model, config.text, config.top_k), strict=True):
        print(sentence)
        for prediction in predictions:
            print(f"{prediction['score']:8.1%}  {prediction['token_str'].strip() or '(a space)'}")
        print()


if __name__ == "__main__":
    run_as_script(main)
