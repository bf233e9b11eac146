"""The sources of a mixture: their folders, and the weights by which they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.mixture import (
    MIXTURE_NAME,
    named_folders,
    named_weights,
    read_mixture,
    sampling_weights,
)
from mlm_common.storage import open_folder
from tfrecord_prep.hub_shards import HubShards, Split
from tfrecord_prep.manifest import ShardSet
from train.config.learning import DataConfig

# By which fractions may miss a sum of 1, as 0.333 three times does.
MAX_ROUNDING = 0.005


@dataclass(frozen=True)
class Source:
    """A source of a mixture: its shards, and its weight relative to the others' (see `train.data.mixture`).

    first_row: rows of it that earlier phases used.
    """

    name: str
    train: ShardSet
    evaluation: ShardSet | None
    weight: int
    first_row: int = 0

    @property
    def identity(self) -> str:
        """What the rows are; without checksums also the name."""
        return "\n".join([*shard_identities(self.train), *([] if self.train.manifest else [self.name])])

    @property
    def num_tokens(self) -> int:
        return num_tokens_of(self.train)


def source_folders(
    text: str, flag: str, split: Split, hub: HubShards
) -> tuple[dict[str, str], dict[str, float | None]]:
    """Find the folders of a split, by source, and the weights of a prepared mixture; the name of a single one is "".

    Those on the Hub are fetched.
    """
    if not text:
        return {}, {}
    folders = {name: hub.local_folder(path, split) for name, path in named_folders(text, flag).items()}
    mixture = read_mixture(folders[""]) if "" in folders else None
    if mixture is None:
        return folders, {}
    named = {name: getattr(one, split) for name, one in mixture.items()}
    found = {name: open_folder(folders[""]).path_of(folder) for name, folder in named.items() if folder is not None}
    require(bool(found), f"must have a folder of {split} shards", flag, folders[""])
    return found, {name: one.weight for name, one in mixture.items()}


def source_weights(
    config: DataConfig, shards: Mapping[str, ShardSet], prepared: Mapping[str, float | None]
) -> tuple[dict[str, float], int | None]:
    """Compute the weights of the sources, by the flags, the mixture's file or their rows; and the rows of an epoch.

    Raises:
        InputError: a source that is unknown or has no weight, weights below 0, fractions whose sum is not 1.
    """
    for flag, pairs in (("--source-weights", config.source_weights), ("--source-passes", config.source_passes)):
        if not pairs:
            continue
        given = named_weights(pairs, flag, shards)
        if flag == "--source-passes":
            rows = {name: given[name] * one.num_rows for name, one in shards.items()}
            return rows, max(1, round(sum(rows.values())))
        total = sum(given.values())
        require(abs(total - 1) <= MAX_ROUNDING, "must have a sum of 1", flag, f"{total:g}")
        return given, None
    if config.sampling_alpha is not None:
        return sampling_weights({name: num_tokens_of(one) for name, one in shards.items()}, config.sampling_alpha), None
    weights = {name: prepared.get(name) for name in shards}
    missing = [name for name, weight in weights.items() if weight is None]
    if 0 < len(missing) < len(weights):
        raise InputError(
            f"{MIXTURE_NAME} of --train-dataset must give each source a weight, or none; {missing[0]} has none. Pass "
            "--source-weights or --sampling-alpha."
        )
    return {name: weights[name] or one.num_rows for name, one in shards.items()}, None


def num_tokens_of(shards: ShardSet) -> int:
    """Count the tokens, without padding; rows, where no manifest says them."""
    return shards.manifest.totals.num_tokens if shards.manifest else shards.num_rows


def shard_identities(shards: ShardSet) -> list[str]:
    """List what identifies these shards: names, and checksums where a manifest has them."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]
