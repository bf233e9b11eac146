"""What the Hugging Face Hub objects to in the metadata of a model's or data set's card."""

import re

import yaml

# A few of those that the Hub knows.
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "other", "unknown")


def metadata_errors(text: str, repo_type: str) -> list[str]:
    """List what the Hub would object to in the metadata of a card, as far as huggingface_hub's own classes know."""
    from huggingface_hub import DatasetCardData, ModelCardData  # slow to import; many want the server's tokens only

    try:
        metadata = yaml.safe_load(text)
        card_data = ModelCardData if repo_type == "model" else DatasetCardData
        card_data(**metadata)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        return [str(error)]
    licenses, languages = (
        [value] if isinstance(value, str) else value or []
        for value in (metadata.get("license"), metadata.get("language"))
    )
    errors = [f'"license" must be one of [{", ".join(LICENSES)}]' for name in licenses if name not in LICENSES]
    return errors + [
        f'"language" must be ISO 639: {name}' for name in languages if not re.fullmatch("[a-z]{2,3}", name)
    ]
