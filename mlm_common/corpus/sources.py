"""Open the corpus of a command, or a mixture of several sources, each of which is a corpus.

A source has a name, the settings of a corpus, and optionally a weight. Paths in a file of sources are relative to the
working directory, as on the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from mlm_common.cli.command_line import as_settings, read_yaml_file, typed_settings
from mlm_common.cli.settings import require
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig, SourcesConfig, SourceWeight
from mlm_common.corpus.corpus import Corpus, check_drawn_splits, open_corpus
from mlm_common.corpus.identity import FILES_KEYS, Part, Record, describe_shared_text, files_keys
from mlm_common.errors import InputError
from mlm_common.mixture import HUB_PREFIX, check_names, check_weights, named_paths, named_weights


@dataclass(frozen=True)
class Mixture:
    """The opened corpora of a command.

    Attributes:
        corpora: corpora by the name of their source, in the order in which they were given. The key is "" for a single
            corpus without a name.
        weights: weight of each source; empty if no weights were given.

    Raises:
        InputError: two sources share text.
    """

    corpora: dict[str, Corpus]
    weights: dict[str, float]

    def __post_init__(self) -> None:
        parts = [
            (name, Part(corpus.record, split)) for name, corpus in self.corpora.items() for split in corpus.split_names
        ]
        for (name, part), (other_name, other_part) in combinations(parts, 2):
            if name != other_name and (shared := describe_shared_text(part, other_part)):
                raise InputError(
                    f"Sources must not share text; for `{name}` and `{other_name}`, {shared}. Name each file for one "
                    "source only."
                )

    @property
    def record(self) -> dict[str, Any]:
        """A record of the mixture as JSON values, stored next to the output. `corpora_of` reads it."""
        records = {name: corpus.record for name, corpus in self.corpora.items()}
        return {"corpus": records[""]} if "" in records else {"sources": records, "source_weights": self.weights}


def corpora_of(record: Mapping[str, Any]) -> dict[str, Record]:
    """Return the records of the corpora in a `Mixture.record`, by name; an empty dict if it has none."""
    return record.get("sources") or ({"": record["corpus"]} if "corpus" in record else {})


def check_recorded_mixture(record: Mapping[str, Any], path: str) -> None:
    """Check a `Mixture.record` that was read from the file `path`.

    Any exception means that the record is damaged.
    """
    corpora = corpora_of(record)
    for corpus in corpora.values():
        settings = typed_settings([CorpusConfig], as_settings(corpus["settings"], path), path)
        if not {"split", "dataset_name", *FILES_KEYS} <= settings.keys():
            raise KeyError("settings of the corpus")
        for file in (file for key in files_keys(corpus) for file in corpus[key]):
            if [type(file[name]) for name in ("path", "num_bytes", "checksum")] != [str, int, str]:
                raise TypeError(f"it names a file by {file!r:.50}")
    if "" not in corpora:
        check_names(corpora, path)
    if weights := dict(record.get("source_weights", {})):
        check_weights({name: weights[name] for name in corpora}, path)


def open_mixture(given: CorpusConfig, sources: SourcesConfig) -> Mixture:
    """Open the sources or, if there are none, the single corpus `given`.

    Args:
        given: settings of the single corpus, or default settings of the sources.
        sources: the sources, if any.

    Raises:
        InputError: `given` names a corpus although there are sources, the file of sources does not map names to
            settings, only some sources have weights, or two sources share text. Also any error of `CorpusConfig`,
            `open_corpus` and `check_drawn_splits`, with the name of the source.
    """
    if sources.sources is None:
        require(not sources.source_weights, "needs --sources", "--source-weights", " ".join(sources.source_weights))
        corpus = open_corpus(given)
        check_drawn_splits(corpus)
        return Mixture({"": corpus}, {})
    if given.is_given:
        raise InputError(
            "--sources cannot be combined with --data-files or --dataset-name. Name that corpus among the sources."
        )
    configs: dict[str, CorpusConfig] = {}
    weights: dict[str, float] = {}
    corpora: dict[str, Corpus] = {}
    where, settings_by_name = _settings_of_sources(sources.sources)
    for name, settings in settings_by_name.items():
        typed = typed_settings([CorpusConfig, SourceWeight], as_settings(settings, where + name), where + name)
        # If a source sets any validation (or test) text, no such setting of `given` applies to it.
        held_out = {key.partition("_")[0] for key in typed} & set(HELD_OUT_SPLITS)
        defaults = {key: value for key, value in given.settings_given.items() if key.partition("_")[0] not in held_out}
        try:
            weight = SourceWeight(typed.pop("weight", None)).weight
            configs[name] = CorpusConfig(**(defaults | typed))
        except InputError as error:
            raise InputError(f"{where}{name}: {error}") from error
        weights |= {name: weight} if weight is not None else {}
    if sources.source_weights:
        weights = named_weights(sources.source_weights, "--source-weights", configs)
    check_weights(weights, where.rstrip(", "))
    if weights and (without := [name for name in configs if name not in weights]):
        raise InputError(f"Either all sources must have a weight or none; {', '.join(without)} have none.")
    for name, config in configs.items():
        try:
            corpora[name] = open_corpus(config)
            check_drawn_splits(corpora[name])
        except InputError as error:
            raise InputError(f"{where}{name}: {error}") from error
    return Mixture(corpora, weights)


def _settings_of_sources(text: str) -> tuple[str, dict[str, Any]]:
    """Read the value of --sources; return the place where the sources are named, for errors, and {name: settings}."""
    files = named_paths(text, "--sources")
    if "" not in files:
        return "--sources ", {name: _corpus_named(words) for name, words in files.items()}
    (path,) = files[""]
    is_file = path.endswith((".yaml", ".yml", ".json")) or Path(path).is_file()
    require(is_file, "must be NAME=FILES for each source, or a YAML file", "--sources", path)
    content = read_yaml_file(path, "--sources")
    if not isinstance(content, dict) or not content:
        rule = "must be a mapping of names to settings, such as `de: {data_files: de/*.txt}`"
        raise InputError(f"--sources {rule}; {path} has {content!r}.")
    for name in content:
        if not isinstance(name, str):
            raise InputError(f"The names of sources must be text; YAML reads a name in {path} as {name!r}. Quote it.")
    check_names(content, path)
    return f"{path}, ", content


def _corpus_named(words: list[str]) -> dict[str, Any]:
    is_on_hub = len(words) == 1 and words[0].startswith(HUB_PREFIX)
    return {"dataset_name": words[0].removeprefix(HUB_PREFIX)} if is_on_hub else {"data_files": words}
