"""The folder of a split before it is written: empty, complete, cut short, or somebody else's."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from tfrecord_prep.manifest import MANIFEST_NAME, OWN_SHARD_NAME, open_shards, read_manifest
from tokenizer_training import storage
from tokenizer_training.command_line import InputError

logger = logging.getLogger(__name__)


def check_folder(folder: str, settings: dict[str, Any]) -> bool:
    """Return whether the folder is complete with these settings, the fields of its manifest known beforehand.

    Raises:
        InputError: it holds shards of other settings, of unknown origin, or damaged ones.
    """
    names = storage.list_files(folder)
    cure = "Give another --output-dir, or --overwrite to replace them."
    if MANIFEST_NAME in names:
        differences = _differences(dataclasses.asdict(read_manifest(folder)), settings)
        if differences:
            raise InputError(f"{folder} holds shards of other settings: {'; '.join(differences)}. {cure}")
        open_shards(folder)
        return True
    shards = [name for name in names if name.endswith(".tfrecord")]
    foreign = [name for name in shards if not OWN_SHARD_NAME.match(name)]
    if foreign:
        raise InputError(f"{folder} holds shards that this command did not write, such as {foreign[0]}. {cure}")
    if shards:
        logger.info("%s was cut short: its %d shards are made again", folder, len(shards))
    return False


def clear_folder(folder: str) -> None:
    """Delete the manifest, then the shards (so that it never looks complete), and what a kill left half-written."""
    names = storage.list_files(folder)
    storage.delete_files(folder, [name for name in names if name == MANIFEST_NAME])
    storage.delete_files(folder, [name for name in names if name.endswith(".tfrecord")])
    if not storage.is_remote(folder):
        for partial in Path(folder).glob(f".*{storage.PARTIAL_SUFFIX}"):
            partial.unlink()


def _differences(found: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    asked_flat = _flat(json.loads(json.dumps(asked, default=dataclasses.asdict)))
    found_flat = _flat({key: found[key] for key in asked})
    return [
        f"{key} is {found_flat.get(key)!r} there, {asked_flat.get(key)!r} is asked for"
        for key in sorted(asked_flat.keys() | found_flat.keys())
        if asked_flat.get(key) != found_flat.get(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
