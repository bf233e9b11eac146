"""The plan of a split, the fields of its manifest that are known beforehand, and which of them the shards depend on."""

from typing import Any

from mlm_common.cli.settings import describe_differences
from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.record import FILES_KEYS, describe_changes, identity, record_of_split

Plan = dict[str, Any]

# What tokenizes and cuts; `datasets` also reads, where the corpus is a data set.
LIBRARIES_OF_SHARDS = ("mlm-pretraining", "tokenizers")
# Settings of a corpus that say where its text is.
PLACES = ("dataset_name", *FILES_KEYS)


def plan_settings(plan: Plan) -> Plan:
    """Reduce a plan to what all its partitions depend on: not on the states of the files, nor where these lie.

    What becomes of bad rows is left out, too, since most partitions have none.
    """
    plan = without_on_bad_row(plan)
    corpus = identity(_without_files(record_of_split(plan.get("corpus", {}), plan.get("split", ""))))
    return plan | {"corpus": corpus, "versions": _versions(plan)}


def describe_plan_differences(found: Plan, asked: Plan, *, of_manifest: bool) -> str:
    """Name what the shards of the plan `asked` depend on and is otherwise in the manifest, or unfinished plan, `found`.

    A manifest, of complete shards, may have been made with other versions. Of an unfinished plan the files may have
    changed where they are, or be the same elsewhere, and what becomes of bad rows may be otherwise.
    """
    if not of_manifest:
        found, asked = without_on_bad_row(found), without_on_bad_row(asked)
    corpora = [record_of_split(plan.get("corpus", {}), asked["split"]) for plan in (found, asked)]
    if not of_manifest and _places(corpora[0]) == _places(corpora[1]):
        corpora = [_without_files(corpus) for corpus in corpora]
    compared = [key for key in asked if key not in ("corpus", "versions")]
    there, here = ({key: plan.get(key) for key in compared} for plan in (found, asked))
    if not of_manifest:
        there["versions"], here["versions"] = _versions(found), _versions(asked)
    return "; ".join(filter(None, (describe_changes(*corpora), describe_differences(there, here))))


def without_on_bad_row(plan: Plan) -> Plan:
    """Leave out of a plan what becomes of bad rows."""
    corpus = plan.get("corpus", {})
    settings = {name: value for name, value in corpus.get("settings", {}).items() if name != "on_bad_row"}
    return plan | {"corpus": corpus | {"settings": settings}}


def _without_files(corpus: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in corpus.items() if name not in FILES_KEYS}


def _places(corpus: dict[str, Any]) -> list[Any]:
    return [corpus["settings"][name] for name in PLACES]


def _versions(plan: Plan) -> dict[str, str]:
    reads_dataset = plan.get("corpus", {}).get("settings", {}).get("dataset_name") not in (None, BUILTIN)
    libraries = [*LIBRARIES_OF_SHARDS, "datasets"] if reads_dataset else LIBRARIES_OF_SHARDS
    return {library: plan.get("versions", {}).get(library, "unknown") for library in libraries}
