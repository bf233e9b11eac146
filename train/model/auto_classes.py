"""The auto classes of transformers, which make the TF classes of this project, too."""

from typing import Any


def auto_class(name: str) -> Any:
    """Look up an auto class, such as TFAutoModelForMaskedLM; imports TensorFlow."""
    import transformers

    import train.model.modernbert_heads  # noqa: F401  (which makes its classes known)

    return getattr(transformers, name)
