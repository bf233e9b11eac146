"""Shards, tokenizer and row length of a run, opened and compared with each other before TensorFlow is imported."""

import functools
import logging
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm_common.cli.settings import flag_of, require
from mlm_common.corpus.identity import Part, describe_possibly_shared_text, describe_shared_text
from mlm_common.errors import InputError
from mlm_common.storage import is_gcs
from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256, vocabulary_size
from tfrecord_prep.manifest import ShardSet, open_shards
from tfrecord_prep.records import first_row_ids
from train.config.learning import SOURCE_SETTINGS, DataConfig
from train.data.inputs import Feature, Inputs
from train.data.sources import Interleaving, Source, shard_identities, source_folders, source_weights

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)

# The weights and the shards of sources, by name; of a single data set under "".
WeightedShards = Mapping[str, tuple[int, ShardSet]]


@dataclass(frozen=True)
class TrainingInputs(Inputs):
    """Shards, tokenizer and length that agree with each other.

    train_shards, eval_shards: of a mixture those of all sources, one after the other.
    window_rows: rows that are held in memory and permuted together.
    sources: of a mixture; empty for a single data set.
    num_epoch_rows: rows of an epoch, where that is not the number of rows that there are.
    max_passes: over a source, above which a warning is due.
    hub_commits: of what was fetched from the Hub, by NAMESPACE/NAME@REVISION.
    """

    train_shards: ShardSet
    eval_shards: ShardSet | None
    tokenizer: PreTrainedTokenizerFast
    tokenizer_source: str
    max_length: int
    window_rows: int = DataConfig.shuffle_buffer_size
    sources: tuple[Source, ...] = ()
    num_epoch_rows: int | None = None
    max_passes: float = DataConfig.max_passes
    hub_commits: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.num_epoch_rows or self.train_shards.num_rows

    @property
    def num_words(self) -> int:
        return self.train_shards.manifest.totals.num_words if self.train_shards.manifest else 0

    @property
    def cuts_words(self) -> bool:
        return any(chunking == "concat" for _, chunking in self.chunkings())

    @property
    def num_eval_rows(self) -> int:
        return self.eval_shards.num_rows if self.eval_shards else 0

    @property
    def unigram_entropy_nats(self) -> float | None:
        manifests = [shards.manifest for _, shards in self._evaluated.values()]
        known = [one.unigram_entropy_nats for one in manifests if one]
        if not known or len(known) < len(manifests):
            return None
        weights = [weight for weight, _ in self._evaluated.values()]
        return sum(map(operator.mul, known, weights)) / sum(weights)

    @property
    def source_entropies_nats(self) -> dict[str, float]:
        """The entropy of the token frequencies of each source of a mixture that is evaluated, where it is known."""
        manifests = {name: shards.manifest for name, (_, shards) in self._evaluated.items() if name}
        return {name: one.unigram_entropy_nats for name, one in manifests.items() if one}

    @functools.cached_property
    def _trained(self) -> WeightedShards:
        return {one.name: (one.weight, one.train) for one in self.all_sources}

    @functools.cached_property
    def _evaluated(self) -> WeightedShards:
        apart = {one.name: (one.weight, one.evaluation) for one in self.sources if one.evaluation}
        return apart or ({"": (1, self.eval_shards)} if self.eval_shards else {})

    @functools.cached_property
    def interleaving(self) -> Interleaving:
        return Interleaving(tuple(source.weight for source in self.sources) or (1,))

    @functools.cached_property
    def all_sources(self) -> tuple[Source, ...]:
        """The sources; a single data set is one without a name."""
        return self.sources or (Source("", self.train_shards, self.eval_shards, 1),)

    def has_rows_of(self, other: Inputs) -> bool:
        assert isinstance(other, TrainingInputs)
        return self._order() == other._order()

    def _order(self) -> list[tuple[str, int]]:
        return [(source.identity, source.weight) for source in self.all_sources]

    def rows_used(self, num_rows: int) -> dict[str, int]:
        return {
            source.identity: source.first_row + self.interleaving.num_rows(index, num_rows)
            for index, source in enumerate(self.all_sources)
        }

    def after(self, rows_used: Mapping[str, int]) -> "TrainingInputs":
        if not any(source.identity in rows_used for source in self.all_sources):
            return self
        sources = tuple(replace(one, first_row=rows_used.get(one.identity, 0)) for one in self.all_sources)
        return replace(self, sources=sources)

    def evaluated(self) -> Mapping[str, tuple[Inputs, float]]:
        total = sum(weight for weight, _ in self._evaluated.values())
        return {
            name: (replace(self, eval_shards=shards, sources=()), weight / total)
            for name, (weight, shards) in self._evaluated.items()
            if shards.num_rows
        }

    def describe_sources(self, first_row: int, num_rows: int) -> dict[str, str]:
        lines = []
        for index, source in enumerate(self.sources):
            passes, last_passes = (
                (source.first_row + self.interleaving.num_rows(index, row)) / source.train.num_rows
                for row in (first_row, first_row + num_rows)
            )
            weight = source.weight / sum(self.interleaving.weights)
            lines.append(
                f"{source.name}: {source.train.num_rows:,} rows, {source.num_tokens:,} tokens, weight {weight:.3%}, "
                f"passes {f'{passes:.2f} so far, ' if passes else ''}{last_passes:.2f} at the end"
            )
            if last_passes > self.max_passes:
                logger.warning(
                    "The run goes %.1f times through %s, more than --max-passes %g: lower its weight, or train for "
                    "fewer steps.",
                    *(last_passes, source.name, self.max_passes),
                )
        return {"sources": "\n".join(lines)} if lines else {}

    def identities(self) -> dict[str, Any]:
        """Collect length, and names and checksums of the shards; of a mixture by source, after their weights."""
        shards = {"train_shards": _identities(self._trained), "eval_shards": _identities(self._evaluated)}
        return {"max_length": self.max_length, **shards}

    def describe(self) -> dict[str, Any]:
        train, evaluated = _describe_sources(self._trained), _describe_sources(self._evaluated)
        if evaluated and "sources" in evaluated:
            evaluated["unigram_entropy_nats"] = self.unigram_entropy_nats
        commits = {"hub_commits": dict(self.hub_commits)} if self.hub_commits else {}
        return {"train_data": train, "eval_data": evaluated, **commits}

    @property
    def train_sets(self) -> list[ShardSet]:
        return [shards for _, shards in self._trained.values()]

    @property
    def eval_sets(self) -> list[ShardSet]:
        return [shards for _, shards in self._evaluated.values()]

    def chunkings(self) -> list[tuple[str, str]]:
        """List the folders of the shards, and how their rows were cut; of the preflight there may be none."""
        known = [one for one in (*self.train_sets, *self.eval_sets) if one.paths]
        return [(one.folder, one.manifest.chunking if one.manifest else "unknown, without a manifest") for one in known]

    def training_batches(
        self, features: Mapping[str, Feature], context: "tf.distribute.InputContext", *, seed: int, **steps: int
    ) -> "tf.data.Dataset":
        from train.data.pipeline import MixtureOrder, SampleOrder, training_batches

        total = sum(self.interleaving.weights)
        orders = [
            SampleOrder(one.train.paths, one.train.num_rows_per_shard, seed, -(-self.window_rows * one.weight // total))
            for one in self.all_sources
        ]
        order = MixtureOrder(orders, self.interleaving, [one.first_row for one in self.all_sources])
        return training_batches(order, features, context, **steps)

    def evaluation_batches(
        self,
        features: Mapping[str, Feature],
        prepare_row: Callable[[dict[str, "tf.Tensor"]], Any],
        context: "tf.distribute.InputContext",
        *,
        global_batch_rows: int,
    ) -> "tf.data.Dataset":
        from train.data.pipeline import evaluation_batches

        assert self.eval_shards is not None
        return evaluation_batches(self.eval_shards, features, prepare_row, context, global_batch_rows=global_batch_rows)

    def num_evaluation_batches(self, global_batch_rows: int) -> int:
        return -(-self.num_eval_rows // global_batch_rows)


def open_inputs(config: DataConfig, hub_commits: dict[str, str] | None = None) -> TrainingInputs:
    """Open the inputs of a run and check them as far as manifests, file sizes and the tokenizer's files allow.

    Args:
        hub_commits: from which shards on the Hub are, as far as it is known; gains the newest of other revisions.

    Raises:
        InputError: shards that are missing, damaged or of another length than asked for; a tokenizer that is not
            the one the shards were made with; rows to evaluate on that share text with those to train on; of a mixture
            also weights that do not suit, and sources that share text; shards that the Hub does not have.
        HubAwayError: shards on the Hub, which is away.
    """
    hub_commits = {} if hub_commits is None else hub_commits
    train_folders, weights = source_folders(str(config.train_dataset), "--train-dataset", "train", hub_commits)
    eval_folders, _ = source_folders(config.eval_dataset or "", "--eval-dataset", "validation", hub_commits)
    # The order of sources that take turns must not depend on that of the flags.
    train_sets = {name: open_shards(folder) for name, folder in sorted(train_folders.items())}
    eval_sets = {name: open_shards(folder) for name, folder in eval_folders.items()}
    is_mixture = "" not in train_sets
    for name, shards in train_sets.items() if is_mixture else ():
        require(shards.num_rows > 0, "must have rows of each source", f"--train-dataset {name}", shards.folder)
    eval_sets = {name: shards for name, shards in eval_sets.items() if shards.num_rows or not name}
    if unknown := [name for name in eval_sets if name and name not in train_sets]:
        known = ", ".join(train_sets) if is_mixture else "only one data set without a name"
        raise InputError(f"--eval-dataset must name sources of --train-dataset ({known}); received {unknown[0]}.")
    first = next(iter(train_sets.values()))
    tokenizer_source = config.tokenizer or first.tokenizer_folder
    if tokenizer_source is None:
        raise InputError(f"--tokenizer is required for shards that came without one; {first.folder} did.")
    tokenizer = load_tokenizer(tokenizer_source)
    # That of the manifest, or for shards without one of the first row.
    manifest = first.manifest
    max_length = manifest.max_length if manifest else len(first_row_ids(first.paths[0]))
    if config.max_length not in (None, max_length):
        raise InputError(
            f"--max-length must be the shards' {max_length} ({first.folder}); received {config.max_length}. "
            "Leave it out, or prepare shards of that length."
        )
    for flag, sets in (("--train-dataset", train_sets), ("--eval-dataset", eval_sets)):
        for shards in sets.values():
            _check_agreement(shards, tokenizer, max_length, flag)
    for one, other in combinations(train_sets.values(), 2):
        if shared := _describe_shared(one, other):
            raise InputError(
                f"The sources of a mixture must have no text in common; {one.folder} and {other.folder}: {shared}. "
                "Leave one out, and raise the weight of the other."
            )
    for train_shards, eval_shards in product(train_sets.values(), eval_sets.values()):
        check_nothing_is_shared(train_shards, eval_shards)
    inputs = TrainingInputs(
        _joined(train_sets.values()),
        _joined(eval_sets.values()) if eval_sets else None,
        tokenizer,
        tokenizer_source,
        max_length,
        config.shuffle_buffer_size,
        max_passes=config.max_passes,
        hub_commits=hub_commits,
    )
    if not is_mixture:
        given = [flag_of(name) for name in SOURCE_SETTINGS if getattr(config, name) not in (None, [])]
        require(not given, "must name the sources, NAME=DIR …", "--train-dataset", f"one folder and {' '.join(given)}")
        return inputs
    weights_of, num_epoch_rows = source_weights(config, train_sets, weights)
    whole = Interleaving.of(list(weights_of.values())).weights
    sources = [
        Source(name, shards, eval_sets.get(name), weight)
        for (name, shards), weight in zip(train_sets.items(), whole, strict=True)
    ]
    return replace(inputs, sources=tuple(sources), num_epoch_rows=num_epoch_rows)


def _joined(sets: Collection[ShardSet]) -> ShardSet:
    """Put the shards of several folders together; without a manifest, which is of one."""
    if len(sets) == 1:
        return next(iter(sets))
    return ShardSet(
        folder=", ".join(one.folder for one in sets),
        paths=tuple(path for one in sets for path in one.paths),
        num_rows_per_shard=tuple(number for one in sets for number in one.num_rows_per_shard),
        num_rows=sum(one.num_rows for one in sets),
        manifest=None,
        tokenizer_folder=next(iter(sets)).tokenizer_folder,
    )


def check_phases(phases: Sequence[TrainingInputs]) -> None:
    """Compare the tokenizers and the text of a run's phases; `open_inputs` has compared those within each phase."""
    first = phases[0]
    for one in phases:
        if tokenizer_sha256(one.tokenizer) != tokenizer_sha256(first.tokenizer):
            raise InputError(
                f"All phases must have shards of one tokenizer; {one.train_shards.folder} is of that in "
                f"{one.tokenizer_source}, {first.train_shards.folder} of that in {first.tokenizer_source}. Prepare "
                "them with the same --tokenizer-name-or-path."
            )
    checked = {(train.folder, other.folder) for one in phases for train in one.train_sets for other in one.eval_sets}
    for one, phase in product(phases, phases):
        for train, other in product(one.train_sets, phase.eval_sets):
            if (train.folder, other.folder) not in checked:
                check_nothing_is_shared(train, other)
                checked.add((train.folder, other.folder))


def _identities(sources: WeightedShards) -> Any:
    named = {name: [weight, *shard_identities(shards)] for name, (weight, shards) in sources.items()}
    return named[""][1:] if "" in named else named or None


def _describe_sources(sources: WeightedShards) -> dict[str, Any] | None:
    """Collect what the manifests say of the rows, without the lists of shards; of a mixture by source."""
    described = {name: _describe_shards(shards) for name, (_, shards) in sources.items()}
    if not described or "" in described:
        return described.get("")
    total = sum(weight for weight, _ in sources.values())
    return {
        **{name: next(iter(described.values())).get(name) for name in ("max_length", "chunking", "tokenizer")},
        "totals": {"num_rows": sum(shards.num_rows for _, shards in sources.values())},
        "sources": {name: {"weight": sources[name][0] / total, **one} for name, one in described.items()},
    }


def _describe_shards(shards: ShardSet) -> dict[str, Any]:
    """Collect what a manifest says about its rows, without the list of shards; only their number without a manifest."""
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in asdict(shards.manifest).items() if name != "shards"}


def _check_agreement(shards: ShardSet, tokenizer: PreTrainedTokenizerFast, max_length: int, flag: str) -> None:
    if shards.manifest is None:
        if (largest_id := first_row_ids(shards.paths[0]).max()) >= vocabulary_size(tokenizer):
            raise InputError(
                f"--tokenizer must be the one the shards were made with; the first row of {shards.folder} has the id "
                f"{largest_id}, and the tokenizer {vocabulary_size(tokenizer)} ids. Name that one."
            )
        return
    if shards.manifest.max_length != max_length:
        raise InputError(
            f"{flag} must have rows as long as the first of --train-dataset, {max_length}; {shards.folder} has "
            f"{shards.manifest.max_length}. Prepare all with the same --max-length."
        )
    sha256 = tokenizer_sha256(tokenizer)
    if shards.manifest.tokenizer.sha256 != sha256:
        raise InputError(
            f"--tokenizer must be the one the shards were made with; {tokenizer.name_or_path} has hash {sha256[:12]}, "
            f"the shards in {shards.folder} {shards.manifest.tokenizer.sha256[:12]}. Leave --tokenizer out, or prepare "
            "the shards again with it."
        )


def check_nothing_is_shared(train_shards: ShardSet, eval_shards: ShardSet) -> None:
    """Check that no rows to evaluate on are of text that is trained on; warn where that is unknown and may well be."""
    folders = f"{eval_shards.folder} and {train_shards.folder}"
    parts = _parts(train_shards, eval_shards)
    shared = _describe_shared(train_shards, eval_shards)
    if len(parts) == 2 and not shared and (reason := describe_possibly_shared_text(*parts)):
        logger.warning("%s, to evaluate and to train on, may share text, since %s.", folders, reason)
    if shared:
        raise InputError(
            f"--eval-dataset must hold no text of --train-dataset, in any phase; {folders}: {shared}. Evaluate on a "
            "split that is not trained on, made by the same prepare_tfrecord_shards.py command (--validation-percent, "
            "--validation-files)."
        )


def _parts(*sets: ShardSet) -> list[Part]:
    return [Part(one.manifest.corpus, one.manifest.split) for one in sets if one.manifest]


def _describe_shared(one: ShardSet, other: ShardSet) -> str:
    parts = _parts(one, other)
    return _describe_shared_shards(one, other) or (describe_shared_text(*parts) if len(parts) == 2 else "")


def _describe_shared_shards(train_shards: ShardSet, eval_shards: ShardSet) -> str:
    """Describe which shards are in both folders, or copies of each other; empty where none is known to be."""
    sets = (train_shards, eval_shards)
    here, there = ({path if is_gcs(path) else os.path.realpath(path) for path in one.paths} for one in sets)
    if shared := sorted(here & there):
        return f"both have the shard {shared[0]}"
    if train_shards.manifest and eval_shards.manifest:
        of_content = {(one.num_bytes, one.num_tokens, one.crc32c): one.name for one in eval_shards.manifest.shards}
        for one in train_shards.manifest.shards:
            if copy := of_content.get((one.num_bytes, one.num_tokens, one.crc32c)):
                return f"both have the rows of a shard ({copy}, {one.name})"
    elif not (train_shards.manifest or eval_shards.manifest):
        names, other_names = (shard_identities(one) for one in sets)
        first_row, other_first_row = (first_row_ids(one.paths[0]) for one in sets)
        if names == other_names and np.array_equal(first_row, other_first_row):
            return f"both have the rows of {names[0]}"
    return ""
