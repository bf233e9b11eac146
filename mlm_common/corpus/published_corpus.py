"""What of the record of a corpus is published: data sets of the Hub by name, files by number, size and checksum."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlm_common.corpus.config import BUILTIN, CorpusConfig
from mlm_common.corpus.record import FILES_KEYS
from mlm_common.hub.redaction import REDACTED, redact_except, withhold_settings

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# In records of files: `checksum`, in older ones `fingerprint`.
FILE_FIELDS = ("checksum", "content_checksum", "fingerprint")


def published_corpus(record: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold of the record of a corpus what is its owner's: names of files and folders. Its identity stays."""
    published = redact_except(record, [BUILTIN])
    published["settings"] = withhold_settings(record["settings"], [CorpusConfig])
    if (name := record["settings"].get("dataset_name")) in (BUILTIN, hub_dataset(record)):
        published["settings"]["dataset_name"] = name
    for key in FILES_KEYS:
        if key in record:
            published[key] = [redact_except(file, FILE_FIELDS) for file in record[key]]
    return published


def published_bad_rows(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Withhold of `BadRows` which rows they are: of their number alone nothing is learned."""
    return {"num_rows": record["num_rows"], "listed": []} if record else None


def hub_dataset(record: Mapping[str, Any]) -> str | None:
    """Find the id of the Hub's data set in the record of a corpus, None for any other corpus."""
    name = record.get("settings", {}).get("dataset_name")
    is_on_hub = name not in (None, BUILTIN) and HUB_ID.fullmatch(name) and not Path(name).exists()
    return name if is_on_hub else None


def names_its_text(record: Mapping[str, Any]) -> bool:
    """Tell whether a record says which text it is of: one that was published may not."""
    settings = record.get("settings", {})
    paths = [path for key in FILES_KEYS for path in settings.get(key, ())]
    return REDACTED not in [settings.get("dataset_name"), *paths]
