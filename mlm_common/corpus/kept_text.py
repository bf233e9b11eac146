"""Documents that take a minute to extract, kept in the user's cache: one file, replaced when its key changes."""

import gzip
import json
import logging
import os
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.storage import open_folder

logger = logging.getLogger(__name__)

FILE_NAME = "built-in-corpus.json.gz"


def cache_folder() -> Path:
    """Return the folder of what this project keeps between commands: `~/.cache/mlm-pretraining`.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mlm-pretraining")


def read_kept(key: str) -> tuple[str, ...] | None:
    """Read the documents that were kept under the key; None where there are none, or the file is damaged."""
    try:
        found = json.loads(gzip.decompress((cache_folder() / FILE_NAME).read_bytes()))
        return tuple(found["documents"]) if found["key"] == key else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def keep(key: str, documents: tuple[str, ...]) -> None:
    """Keep the documents under the key, instead of those kept before; do nothing where that cannot be written."""
    content = json.dumps({"key": key, "documents": documents}, ensure_ascii=False)
    try:
        folder = open_folder(str(cache_folder()))
        folder.delete_partial_files()  # of a run that was killed
        folder.write_bytes(FILE_NAME, gzip.compress(content.encode(), compresslevel=1, mtime=0))
    except (OSError, InputError, RuntimeError) as error:
        logger.debug("The text cannot be kept for the next command: %s", error)
