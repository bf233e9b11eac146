"""What of the record of a corpus is published: data sets of the Hub by name, files by number, size and checksum."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlm_common.hub.disclosure import WITHHELD, withhold_except, withhold_settings
from tokenizer_training.corpus.config import BUILTIN, CorpusConfig

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What says which part of a data set of the Hub was read.
HUB_SETTINGS = ("dataset_name", "dataset_config", "dataset_revision", "validation_split", "test_split", "text_column")
# In records of files: `checksum`, in older ones `fingerprint`.
FILE_FIELDS = ("checksum", "fingerprint")
FILE_LISTS = ("data_files", "validation_files", "test_files")


def published_corpus(record: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold of a `Corpus.description` what is its owner's: names of files and folders."""
    settings = record["settings"]
    published = withhold_except(record, ["builtin"])
    published["settings"] = withhold_settings(settings, [CorpusConfig])
    if hub_dataset(record) is not None or settings.get("dataset_name") == BUILTIN:
        published["settings"] |= {name: settings[name] for name in HUB_SETTINGS if name in settings}
    for name in FILE_LISTS:
        if name in record:
            published[name] = [withhold_except(file, FILE_FIELDS) for file in record[name]]
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
    return WITHHELD not in (settings.get("dataset_name"), *settings.get("data_files", ()))
