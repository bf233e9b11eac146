"""Settings as fields of dataclasses: each field is a flag with its help text, and rules that its value must meet."""

import dataclasses
import difflib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from mlm_common.errors import InputError

NUM_DIFFERENCES_SHOWN = 5
# Marks a setting that may be published although it is text; numbers and choices always may.
PUBLIC = "public"
# The bounds that a number may have, and the words for them.
BOUNDS = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def flag(
    default: Any,
    help_text: str,
    *marks: str,
    alias: str | None = None,
    group: str | None = None,
    metavar: str | None = None,
    is_usual: bool = False,
    is_positional: bool = False,
    takes_several: bool = False,
    or_word: str | None = None,
    off_help: str | None = None,
    replaces: str | None = None,
    belongs_to: tuple[str, Any] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Make a dataclass field that is a flag.

    Args:
        default: of the field; `list` for an empty one.
        help_text: of the flag; if it says "Default:", the default is not appended.
        marks: words by which other modules select settings.
        alias: another accepted name, that of another program.
        group: in `--help`; by default the `FLAG_GROUP` of its dataclass.
        metavar: placeholder of its value in `--help`; by default it follows from type and name.
        is_usual: whether `--help` lists it first.
        takes_several: whether a flag of text takes several words, which become one text, quoted as in a shell.
        or_word: a word that a flag of a whole number also takes.
        is_positional: whether its values are words of the command line without a flag.
        off_help: help text of `--no-…`, for a flag that is on by default.
        replaces: the field whose value this one stands for: where it is given, a preset's value of that is left out.
        belongs_to: a field and its value: where that field has another one, a preset's value of this one is left out.
        at_least, above, at_most, below: bounds of a number, which `--help` shows and `Bounded` checks.
    """
    given = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    bounds = {name: bound for name, bound in given.items() if bound is not None}
    if bounds:
        rule = _describe_bounds(bounds)
        help_text = f"{help_text} {rule[0].upper()}{rule[1:]}."
    options = {
        "is_usual": is_usual,
        "is_positional": is_positional,
        "takes_several": takes_several,
        "aliases": list(dict.fromkeys((f"--{alias}", flag_of(alias)))) if alias else None,
        "bounds": bounds,
        "group": group,
        "metavar": metavar,
        "or_word": or_word,
        "replaces": replaces,
        "belongs_to": belongs_to,
        "off_help": off_help and off_help.replace("%", "%%"),  # argparse formats its help
    }
    metadata: dict[str, Any] = {"help": help_text.replace("%", "%%"), "marks": marks}
    metadata |= {name: value for name, value in options.items() if value}
    if default is list:
        return field(default_factory=list, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(holds: bool, rule: str, flag_name: str, received: object) -> None:
    """Refuse a setting that breaks a rule, by an InputError with the flag, the rule and what was received."""
    if not holds:
        raise InputError(f"{flag_name} {rule}; received {received}.")


class Bounded:
    """A dataclass of settings whose bounds are checked when it is made."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value, bounds = getattr(self, one.name), one.metadata.get("bounds", {})
            is_number = value is not None and value != one.metadata.get("or_word")
            is_within = not is_number or all(BOUNDS[name][1](value, bound) for name, bound in bounds.items())
            require(is_within, f"must be {_describe_bounds(bounds)}", flag_of(one.name), value)


def _describe_bounds(bounds: Mapping[str, float]) -> str:
    """Describe bounds, as in `at least 0 and below 1`."""
    return " and ".join(f"{BOUNDS[name][0]} {bound:,}" for name, bound in bounds.items())


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to a mistyped one; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def describe_differences(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """Describe the first settings of `asked`, in JSON's types, that differ in `found`; empty if all are equal."""
    found_leaves, asked_leaves = dict(_leaves({key: found.get(key) for key in asked})), dict(_leaves(asked))
    different = [
        f"{name} is {found_leaves.get(name)!r} there, {asked_leaves.get(name)!r} is asked for"
        for name in sorted(found_leaves.keys() | asked_leaves.keys())
        if found_leaves.get(name) != asked_leaves.get(name)
    ]
    num_more = len(different) - NUM_DIFFERENCES_SHOWN
    return "; ".join(different[:NUM_DIFFERENCES_SHOWN] + [f"and {num_more:,} more"] * (num_more > 0))


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple) and tree:
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{name}[{number}]")
    else:
        yield name, tree
