"""Open the shards and the tokenizer of a run, and check that they fit together, before TensorFlow is imported."""

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
from mlm_common.corpus.identity import Part, describe_shared_text
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

# {name of the source: (weight, shards)}; a single data set has the name "".
WeightedShards = Mapping[str, tuple[int, ShardSet]]


@dataclass(frozen=True)
class TrainingInputs(Inputs):
    """Shards, tokenizer and row length that fit together.

    Attributes:
        train_shards: training shards; for a mixture, the shards of all sources.
        eval_shards: validation shards; for a mixture, the shards of all sources.
        tokenizer: the tokenizer that produced the ids.
        tokenizer_source: folder or Hub id of the tokenizer.
        max_length: tokens per row.
        window_rows: number of rows that are held in memory and permuted together.
        sources: sources of a mixture; empty for a single data set.
        num_epoch_rows: number of rows of an epoch, if it differs from the number of training rows.
        max_passes: the run warns if it reads a source more often than this.
        hub_commits: commits of shards from the Hub, {NAMESPACE/NAME@REVISION: commit}.
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
        entropies = [manifest.unigram_entropy_nats for manifest in manifests if manifest]
        if not entropies or len(entropies) < len(manifests):
            return None
        weights = [weight for weight, _ in self._evaluated.values()]
        return sum(map(operator.mul, entropies, weights)) / sum(weights)

    @property
    def source_entropies_nats(self) -> dict[str, float]:
        """Entropies of the token frequencies of a mixture's sources, in nats, as {name: entropy}, if known."""
        manifests = {name: shards.manifest for name, (_, shards) in self._evaluated.items() if name}
        return {name: manifest.unigram_entropy_nats for name, manifest in manifests.items() if manifest}

    @functools.cached_property
    def _trained(self) -> WeightedShards:
        return {source.name: (source.weight, source.train) for source in self.all_sources}

    @functools.cached_property
    def _evaluated(self) -> WeightedShards:
        sources = {source.name: (source.weight, source.evaluation) for source in self.sources if source.evaluation}
        return sources or ({"": (1, self.eval_shards)} if self.eval_shards else {})

    @functools.cached_property
    def interleaving(self) -> Interleaving:
        return Interleaving(tuple(source.weight for source in self.sources) or (1,))

    @functools.cached_property
    def all_sources(self) -> tuple[Source, ...]:
        """The sources; a single data set is a source with an empty name."""
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
        sources = tuple(replace(source, first_row=rows_used.get(source.identity, 0)) for source in self.all_sources)
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
                    "The run reads %s %.1f times, more than --max-passes %g: lower its weight, or train for fewer "
                    "steps.",
                    *(source.name, last_passes, self.max_passes),
                )
        return {"sources": "\n".join(lines)} if lines else {}

    def identities(self) -> dict[str, Any]:
        """Return row length, and names and checksums of the shards; for a mixture {source: [weight, shard, …]}."""
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
        """Return (folder, chunking) of all shards; empty in a preflight without shards."""
        return [
            (shards.folder, shards.manifest.chunking if shards.manifest else "unknown, without a manifest")
            for shards in (*self.train_sets, *self.eval_sets)
            if shards.paths
        ]

    def training_batches(
        self, features: Mapping[str, Feature], context: "tf.distribute.InputContext", *, seed: int, **steps: int
    ) -> "tf.data.Dataset":
        from train.data.pipeline import MixtureOrder, SampleOrder, training_batches

        total = sum(self.interleaving.weights)
        orders = [
            SampleOrder(
                *(source.train.paths, source.train.num_rows_per_shard, seed),
                window_rows=-(-self.window_rows * source.weight // total),
            )
            for source in self.all_sources
        ]
        order = MixtureOrder(orders, self.interleaving, [source.first_row for source in self.all_sources])
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
    """Open the inputs of a run, and check manifests, file sizes and the tokenizer.

    Args:
        config: the settings.
        hub_commits: commits at which to read shards on the Hub, {NAMESPACE/NAME@REVISION: commit}. If a revision has no
            entry, an entry with its newest commit is added.

    Raises:
        InputError: shards are missing or damaged, do not have the requested row length, or were made with another
            tokenizer; validation rows share text with training rows; the Hub does not have the shards; or, in a
            mixture, weights are invalid or sources share text.
        HubAwayError: shards are on the Hub, which cannot be reached.
    """
    hub_commits = {} if hub_commits is None else hub_commits
    train_folders, weights = source_folders(str(config.train_dataset), "--train-dataset", "train", hub_commits)
    eval_folders, _ = source_folders(config.eval_dataset or "", "--eval-dataset", "validation", hub_commits)
    # Sources are sorted, because the order of rows must not depend on the order of the flags.
    train_sets = {name: open_shards(folder) for name, folder in sorted(train_folders.items())}
    eval_sets = {name: open_shards(folder) for name, folder in eval_folders.items()}
    is_mixture = "" not in train_sets
    for name, shards in train_sets.items() if is_mixture else ():
        require(shards.num_rows > 0, "must have rows", f"--train-dataset {name}", f"{shards.folder} without any")
    eval_sets = {name: shards for name, shards in eval_sets.items() if shards.num_rows or not name}
    if unknown := [name for name in eval_sets if name and name not in train_sets]:
        sources_shown = ", ".join(train_sets) if is_mixture else "only one data set without a name"
        raise InputError(
            f"--eval-dataset must name sources of --train-dataset ({sources_shown}); received {unknown[0]}."
        )
    first = next(iter(train_sets.values()))
    tokenizer_source = config.tokenizer or first.tokenizer_folder
    if tokenizer_source is None:
        raise InputError(f"--tokenizer is required for shards without a tokenizer; {first.folder} has none.")
    tokenizer = load_tokenizer(tokenizer_source)
    # The length in the manifest; for shards without a manifest, the length of the first row.
    manifest = first.manifest
    max_length = manifest.max_length if manifest else len(first_row_ids(first.paths[0]))
    if config.max_length not in (None, max_length):
        raise InputError(
            f"--max-length must be the shards' {max_length} ({first.folder}); received {config.max_length}. "
            "Leave it out, or prepare shards with that length."
        )
    for flag, sets in (("--train-dataset", train_sets), ("--eval-dataset", eval_sets)):
        for shards in sets.values():
            _check_agreement(shards, tokenizer, max_length, flag)
    for shards, other_shards in combinations(train_sets.values(), 2):
        if shared := _describe_shared(shards, other_shards):
            raise InputError(
                "The sources of a mixture must have no text in common; "
                f"{shards.folder} and {other_shards.folder}: {shared}. "
                "Leave one of them out, and raise the weight of the other."
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
    weights_by_source, num_epoch_rows = source_weights(config, train_sets, weights)
    integer_weights = Interleaving.of(list(weights_by_source.values())).weights
    sources = [
        Source(name, shards, eval_sets.get(name), weight)
        for (name, shards), weight in zip(train_sets.items(), integer_weights, strict=True)
    ]
    return replace(inputs, sources=tuple(sources), num_epoch_rows=num_epoch_rows)


def _joined(sets: Collection[ShardSet]) -> ShardSet:
    """Join the shards of several folders. The result has no manifest, because a manifest describes a single folder."""
    if len(sets) == 1:
        return next(iter(sets))
    return ShardSet(
        folder=", ".join(shards.folder for shards in sets),
        paths=tuple(path for shards in sets for path in shards.paths),
        num_rows_per_shard=tuple(num_rows for shards in sets for num_rows in shards.num_rows_per_shard),
        num_rows=sum(shards.num_rows for shards in sets),
        manifest=None,
        tokenizer_folder=next(iter(sets)).tokenizer_folder,
    )


def check_phases(phases: Sequence[TrainingInputs]) -> None:
    """Check that phases have the same tokenizer, and that no phase is evaluated on another phase's training text.

    `open_inputs` has already checked each phase by itself.

    Raises:
        InputError: the phases do not fit together.
    """
    first = phases[0]
    for phase in phases:
        if tokenizer_sha256(phase.tokenizer) != tokenizer_sha256(first.tokenizer):
            raise InputError(
                f"All phases must have shards of the same tokenizer; {phase.train_shards.folder} was made with "
                f"{phase.tokenizer_source}, {first.train_shards.folder} with {first.tokenizer_source}. Prepare them "
                "with the same --tokenizer-name-or-path."
            )
    checked = {
        (train.folder, evaluation.folder)
        for phase in phases
        for train in phase.train_sets
        for evaluation in phase.eval_sets
    }
    for training_phase, evaluated_phase in product(phases, phases):
        for train, evaluation in product(training_phase.train_sets, evaluated_phase.eval_sets):
            if (train.folder, evaluation.folder) not in checked:
                check_nothing_is_shared(train, evaluation)
                checked.add((train.folder, evaluation.folder))


def _identities(sources: WeightedShards) -> Any:
    identities = {name: [weight, *shard_identities(shards)] for name, (weight, shards) in sources.items()}
    return identities[""][1:] if "" in identities else identities or None


def _describe_sources(sources: WeightedShards) -> dict[str, Any] | None:
    """Return the content of the manifests without the lists of shards; for a mixture, by source."""
    descriptions = {name: _describe_shards(shards) for name, (_, shards) in sources.items()}
    if not descriptions or "" in descriptions:
        return descriptions.get("")
    total = sum(weight for weight, _ in sources.values())
    first = next(iter(descriptions.values()))
    return {
        **{name: first.get(name) for name in ("max_length", "chunking", "tokenizer")},
        "totals": {"num_rows": sum(shards.num_rows for _, shards in sources.values())},
        "sources": {
            name: {"weight": sources[name][0] / total, **description} for name, description in descriptions.items()
        },
    }


def _describe_shards(shards: ShardSet) -> dict[str, Any]:
    """Return the content of a manifest without the list of shards; without a manifest, only the number of rows."""
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in asdict(shards.manifest).items() if name != "shards"}


def _check_agreement(shards: ShardSet, tokenizer: PreTrainedTokenizerFast, max_length: int, flag: str) -> None:
    if shards.manifest is None:
        if (largest_id := first_row_ids(shards.paths[0]).max()) >= vocabulary_size(tokenizer):
            raise InputError(
                f"--tokenizer must be the one the shards were made with; the first row of {shards.folder} has the id "
                f"{largest_id}, but the tokenizer has only {vocabulary_size(tokenizer)} ids. Pass the right tokenizer."
            )
        return
    if shards.manifest.max_length != max_length:
        raise InputError(
            f"{flag} must have rows of the same length as the first data set of --train-dataset, {max_length}; "
            f"{shards.folder} has {shards.manifest.max_length}. Prepare all shards with the same --max-length."
        )
    sha256 = tokenizer_sha256(tokenizer)
    if shards.manifest.tokenizer.sha256 != sha256:
        raise InputError(
            f"--tokenizer must be the one the shards were made with; {tokenizer.name_or_path} has hash {sha256[:12]}, "
            f"the tokenizer of the shards in {shards.folder} has {shards.manifest.tokenizer.sha256[:12]}. Leave "
            "--tokenizer out, or prepare the shards again with this tokenizer."
        )


def check_nothing_is_shared(train_shards: ShardSet, eval_shards: ShardSet) -> None:
    """Check that validation rows share no text with training rows, as far as the shards' metadata shows.

    Raises:
        InputError: the rows share text.
    """
    if shared := _describe_shared(train_shards, eval_shards):
        raise InputError(
            f"--eval-dataset must not contain text of --train-dataset, in any phase; {eval_shards.folder} and "
            f"{train_shards.folder}: {shared}. Evaluate on a split that is not trained on, made by the same "
            "prepare_tfrecord_shards.py command (--validation-percent, --validation-files)."
        )


def _describe_shared(shards: ShardSet, other_shards: ShardSet) -> str:
    sets = (shards, other_shards)
    parts = [Part(each.manifest.corpus, each.manifest.split) for each in sets if each.manifest]
    return _describe_shared_shards(shards, other_shards) or (describe_shared_text(*parts) if len(parts) == 2 else "")


def _describe_shared_shards(train_shards: ShardSet, eval_shards: ShardSet) -> str:
    """Describe a shard that both folders contain, under the same or different names; empty without such a shard."""
    sets = (train_shards, eval_shards)
    train_paths, eval_paths = (
        {path if is_gcs(path) else os.path.realpath(path) for path in shards.paths} for shards in sets
    )
    if shared := sorted(train_paths & eval_paths):
        return f"both have the shard {shared[0]}"
    if train_shards.manifest and eval_shards.manifest:
        eval_names = {
            (shard.num_bytes, shard.num_tokens, shard.crc32c): shard.name for shard in eval_shards.manifest.shards
        }
        for shard in train_shards.manifest.shards:
            if copy := eval_names.get((shard.num_bytes, shard.num_tokens, shard.crc32c)):
                return f"both have the rows of a shard ({copy}, {shard.name})"
    elif not (train_shards.manifest or eval_shards.manifest):
        names, other_names = (shard_identities(shards) for shards in sets)
        first_row, other_first_row = (first_row_ids(shards.paths[0]) for shards in sets)
        if names == other_names and np.array_equal(first_row, other_first_row):
            return f"both have the rows of {names[0]}"
    return ""
