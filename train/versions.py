"""Versions of the libraries that decide what is trained."""

from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("tensorflow", "tensorflow-tpu", "tf-keras", "transformers", "tokenizers", "numpy")


def installed_versions() -> dict[str, str]:
    """Return {library: version} of those that are installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
