"""Redact records before publishing: keep numbers and text known to be public, and replace everything else.

Paths, buckets, projects and host names therefore never leave this machine, not even in fields that are added later.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from hashlib import sha256
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mlm_common.cli.settings import PUBLIC, fields_marked

REDACTED = "(redacted)"


def redact(value: Any) -> Any:
    """Replace text, and values that may contain text, with `REDACTED`. Numbers and empty values stay."""
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value if isinstance(value, int | float) or not value else REDACTED


def redact_except(record: Mapping[str, Any], public: Collection[str]) -> dict[str, Any]:
    """Redact all values of a record except those whose names are in `public`."""
    return {name: value if name in public else redact(value) for name, value in record.items()}


def redact_settings(settings: Mapping[str, Any], config_classes: Iterable[type]) -> dict[str, Any]:
    """Redact the settings that are free text, unless `config_classes` mark them as `PUBLIC`."""
    public: set[str] = set()
    for config_class in config_classes:
        types = get_type_hints(config_class)
        public |= fields_marked(config_class, PUBLIC)
        public |= {
            field.name for field in fields(config_class) if settings.get(field.name) in _choices(types[field.name])
        }
    return redact_except(settings, public)


def redacted_hash(value: Any) -> str:
    """Replace a value with its hash, so that it can still be compared."""
    return f"{REDACTED} {sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()}"


def is_same(recorded: Any, value: Any) -> bool:
    """Return whether a recorded value equals `value`, or is its `redacted_hash`."""
    return recorded == value or recorded == redacted_hash(value)


def _choices(type_: Any) -> list[Any]:
    members = [type_, *get_args(type_)]
    return [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
