"""The check before a run that what it will publish can be pushed; no TensorFlow."""

from mlm_common.hub.access import check_hub_access
from train.config import HubConfig


def check_can_push(config: HubConfig) -> None:
    """Check, where a repository is named, that the token may write to it and that the Hub accepts the card's metadata.

    Raises:
        InputError: it may not, or the Hub does not.
    """
    repository = config.repository()
    if repository is not None:
        check_hub_access(repository, card=preliminary_card(config))


def preliminary_card(config: HubConfig) -> str:
    """Make a card of what the settings say: the part of the metadata that the Hub could refuse."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(library_name="transformers", license=config.hub_license, language=config.hub_language or None)
    return f"---\n{data.to_yaml()}\n---\n"
