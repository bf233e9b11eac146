"""Open the corpus of a command: a single one, or a mixture of several sources that a file names, each a corpus.

A source has a name, the settings of a corpus, and perhaps a weight. The paths in the file are those of flags: relative
to the working directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from mlm_common.cli.command_line import as_settings, read_yaml_file, typed_settings
from mlm_common.corpus.config import HELD_OUT_SPLITS, CorpusConfig, SourceWeight
from mlm_common.corpus.corpus import Corpus, open_corpus
from mlm_common.corpus.identity import Part, Record, describe_shared_text
from mlm_common.errors import InputError
from mlm_common.mixture import check_names


@dataclass(frozen=True)
class Mixture:
    """Opened corpora by name, in the order of the file; a single corpus without a name is under "".

    `weights` has one for each source, or none at all.

    Raises:
        InputError: two sources share text.
    """

    corpora: dict[str, Corpus]
    weights: dict[str, float]

    def __post_init__(self) -> None:
        parts = [
            (name, Part(corpus.record, split)) for name, corpus in self.corpora.items() for split in corpus.split_names
        ]
        for (name, one), (other_name, other) in combinations(parts, 2):
            if name != other_name and (shared := describe_shared_text(one, other)):
                raise InputError(
                    f"Sources must not share text; of `{name}` and `{other_name}` {shared}. Name each file for one "
                    "source only."
                )

    @property
    def record(self) -> dict[str, Any]:
        """What is recorded beside that which is made of it, of values that JSON has: `corpora_of` reads it."""
        records = {name: corpus.record for name, corpus in self.corpora.items()}
        return {"corpus": records[""]} if "" in records else {"sources": records, "source_weights": self.weights}


def corpora_of(record: Mapping[str, Any]) -> dict[str, Record]:
    """Return the records of the corpora in a `Mixture.record`, by name; none if it has none."""
    return record.get("sources") or ({"": record["corpus"]} if "corpus" in record else {})


def open_mixture(given: CorpusConfig, sources_file: str | None) -> Mixture:
    """Open the corpus `given` or, if there is a file, its sources, for which `given` has the defaults.

    Raises:
        InputError: `given` names a corpus beside the file; the file is not a mapping of names to settings, or gives
            weights to some sources only; two sources share text; and, with the name of the source, what
            `CorpusConfig` and `open_corpus` raise.
    """
    if sources_file is None:
        return Mixture({"": open_corpus(given)}, {})
    if given.is_given:
        raise InputError(
            "--sources cannot be combined with --data-files or --dataset-name: name that corpus in its file."
        )
    content = read_yaml_file(sources_file, "--sources")
    if not isinstance(content, dict) or not content:
        raise InputError(
            f"--sources must be a mapping of names to settings, such as `de: {{data_files: de/*.txt}}`; {sources_file} "
            f"has {content!r}."
        )
    for name in content:
        if not isinstance(name, str):
            raise InputError(
                f"The names of sources must be text; YAML reads one in {sources_file} as {name!r}: quote it."
            )
    check_names(content, sources_file)
    configs: dict[str, CorpusConfig] = {}
    weights: dict[str, float] = {}
    corpora: dict[str, Corpus] = {}
    for name, settings in content.items():
        where = f"{sources_file}, {name}"
        typed = typed_settings([CorpusConfig, SourceWeight], as_settings(settings, where), where)
        # Validation or test text that a source names replaces that of `given`.
        held_out = {key.partition("_")[0] for key in typed} & set(HELD_OUT_SPLITS)
        defaults = {key: value for key, value in given.settings_given.items() if key.partition("_")[0] not in held_out}
        try:
            weight = SourceWeight(typed.pop("weight", None)).weight
            configs[name] = CorpusConfig(**(defaults | typed))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        weights |= {name: weight} if weight is not None else {}
    if weights and (without := [name for name in content if name not in weights]):
        raise InputError(
            f"Give a weight to all sources of {sources_file}, or to none; {', '.join(without)}: none given."
        )
    for name, config in configs.items():
        try:
            corpora[name] = open_corpus(config)
        except InputError as error:
            raise InputError(f"{sources_file}, {name}: {error}") from error
    return Mixture(corpora, weights)
