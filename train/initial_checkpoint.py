"""Whether a checkpoint can be trained on with the shards there are: the same vocabulary, weights that can be read."""

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from tokenizer_training import storage
from tokenizer_training.command_line import InputError
from tokenizer_training.tokenizer import load_tokenizer, special_ids, vocabulary_size
from train.architectures import ARCHITECTURES
from train.checkpoint_files import WEIGHTS_NAMES, find_weights, read_config, without_weights


def checked_initial_config(folder_or_hub_id: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Return the configuration of the checkpoint of `--init-from`, once it is known to suit the shards' tokenizer.

    Raises:
        InputError: it cannot be read, or its rows of the embedding are not those of the tokenizer's ids.
    """
    with without_weights(folder_or_hub_id) as name:
        try:
            config = read_config(name)
        except InputError as error:
            raise InputError(f"--init-from: {error}") from error
        _check_vocabulary(folder_or_hub_id, load_tokenizer(name), tokenizer)
    if config.vocab_size < vocabulary_size(tokenizer):
        raise InputError(
            f"--init-from must have an embedding for each of the tokenizer's {vocabulary_size(tokenizer)} ids; "
            f"{folder_or_hub_id} has {config.vocab_size}. Use a checkpoint of the same vocabulary."
        )
    pad_id = special_ids(tokenizer)["pad"]
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture and architecture.counts_positions and config.pad_token_id != pad_id:
        raise InputError(
            f"A {config.model_type} counts its positions from the padding id: --init-from must have the tokenizer's "
            f"{pad_id}; {folder_or_hub_id} has pad_token_id {config.pad_token_id}."
        )
    _check_weights(folder_or_hub_id)
    return config


def _check_vocabulary(
    folder_or_hub_id: str, theirs: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    rule = (
        "--init-from must have the vocabulary that the shards were made with, since what was learned belongs to the "
        f"ids; {folder_or_hub_id} "
    )
    cure = f"Prepare the shards with --tokenizer-name-or-path {folder_or_hub_id}."
    ids, their_ids = ({index: token for token, index in one.get_vocab().items()} for one in (tokenizer, theirs))
    differing = sorted(index for index in ids.keys() | their_ids.keys() if ids.get(index) != their_ids.get(index))
    if differing:
        first = differing[0]
        raise InputError(
            f"{rule}has {len(their_ids)} tokens and the shards' tokenizer {len(ids)}, of which {len(differing)} ids "
            f"differ, the first {first}: {their_ids.get(first)!r} there, {ids.get(first)!r} here. {cure}"
        )
    if special_ids(theirs) != special_ids(tokenizer):
        raise InputError(
            f"{rule}has special ids {special_ids(theirs)}, the shards' tokenizer {special_ids(tokenizer)}. {cure}"
        )


def _check_weights(folder_or_hub_id: str) -> None:
    if not storage.is_remote(folder_or_hub_id):
        find_weights(folder_or_hub_id)
    elif not set(WEIGHTS_NAMES) & set(storage.list_files(folder_or_hub_id)):
        raise InputError(f"--init-from must hold one of {', '.join(WEIGHTS_NAMES)}; {folder_or_hub_id} does not.")
