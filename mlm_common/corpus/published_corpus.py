"""The published record of a corpus: data sets of the Hub by name, files by number, size and checksum."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlm_common.corpus.config import BUILTIN, CorpusConfig
from mlm_common.corpus.identity import FILES_KEYS
from mlm_common.hub.redaction import REDACTED, redact_except, redact_settings

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# In records of files: text that is published.
FILE_FIELDS = ("checksum", "content_checksum")


def published_corpus(record: Mapping[str, Any]) -> dict[str, Any]:
    """Redact names of files and folders in the record of a corpus. Its identity stays."""
    published = redact_except(record, [BUILTIN])
    published["settings"] = redact_settings(record["settings"], [CorpusConfig])
    if (name := record["settings"].get("dataset_name")) in (BUILTIN, hub_dataset(record)):
        published["settings"]["dataset_name"] = name
    for key in FILES_KEYS:
        if key in record:
            published[key] = [redact_except(file, FILE_FIELDS) for file in record[key]]
    return published


def published_bad_rows(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Keep of `BadRows` only their number."""
    return {"num_rows": record["num_rows"], "listed": []} if record else None


def hub_dataset(record: Mapping[str, Any]) -> str | None:
    """Find the id of the Hub's data set in the record of a corpus, None for any other corpus."""
    name = record.get("settings", {}).get("dataset_name")
    is_on_hub = name not in (None, BUILTIN) and HUB_ID.fullmatch(name) and not Path(name).exists()
    return name if is_on_hub else None


def names_its_text(record: Mapping[str, Any]) -> bool:
    """Return whether a record says which text it is of: a published one may not."""
    settings = record.get("settings", {})
    paths = [path for key in FILES_KEYS for path in settings.get(key, ())]
    return REDACTED not in [settings.get("dataset_name"), *paths]
