"""Settings as fields of dataclasses. Each field is a flag with a help text and rules for its value."""

import dataclasses
import difflib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, get_type_hints

from mlm_common.errors import InputError

NUM_DIFFERENCES_SHOWN = 5
# The bounds that a number may have, with the words that describe them.
BOUNDS = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Mark:
    """A property of some settings, such as that they may be published; part of the annotation of their fields."""

    meaning: str


PUBLIC = Mark("Its text may be published. Numbers and choices may always be published.")
Public = Annotated[Value, PUBLIC]


def fields_marked(config_class: type, mark: Mark) -> set[str]:
    """Return the names of the fields of a dataclass whose annotations have a mark."""
    types = get_type_hints(config_class, include_extras=True)
    names = [setting.name for setting in dataclasses.fields(config_class)]
    return {name for name in names if mark in getattr(types[name], "__metadata__", ())}


def flag(
    default: Any,
    help_text: str,
    *,
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
        default: default of the field; `list` for an empty list.
        help_text: help text of the flag. The default is appended unless the text contains "Default:".
        alias: a second accepted name, which another program uses.
        group: group in `--help`; default: the `FLAG_GROUP` of the dataclass.
        metavar: placeholder of the value in `--help`; default: derived from type and name.
        is_usual: whether `--help` shows the flag. `--help-all` shows all flags, the usual flags first.
        is_positional: whether the values are words of the command line without a flag.
        takes_several: whether the flag takes several words, which are joined into one text, quoted as for a shell.
        or_word: a word that the flag accepts instead of a whole number.
        off_help: help text of `--no-…`, for a flag that is on by default.
        replaces: another field that this one replaces. If this flag is given, a preset's value of the other field is
            ignored.
        belongs_to: another field and a value. Unless the other field has this value, a preset's value of this field is
            ignored.
        at_least: inclusive lower bound of a number. `--help` shows bounds, and `Bounded` checks them.
        above: exclusive lower bound of a number.
        at_most: inclusive upper bound of a number.
        below: exclusive upper bound of a number.
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
        "off_help": off_help and off_help.replace("%", "%%"),  # argparse formats help texts with %
    }
    metadata: dict[str, Any] = {"help": help_text.replace("%", "%%")}
    metadata |= {name: value for name, value in options.items() if value}
    if default is list:
        return field(default_factory=list, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(holds: bool, rule: str, flag_name: str, received: object) -> None:
    """Check a rule of a setting.

    Args:
        holds: whether the setting meets the rule.
        rule: completes a sentence that starts with the flag, such as `must be at least 1`.
        flag_name: the flag.
        received: the value that was received.

    Raises:
        InputError: the rule does not hold.
    """
    if not holds:
        raise InputError(f"{flag_name} {rule}; received {received}.")


class Bounded:
    """Base class of settings dataclasses, which checks the bounds of their numbers.

    Raises:
        InputError: a number is out of its bounds.
    """

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):  # type: ignore[arg-type]
            value, bounds = getattr(self, setting.name), setting.metadata.get("bounds", {})
            is_number = value is not None and value != setting.metadata.get("or_word")
            is_within = not is_number or all(BOUNDS[name][1](value, bound) for name, bound in bounds.items())
            require(is_within, f"must be {_describe_bounds(bounds)}", flag_of(setting.name), value)


def _describe_bounds(bounds: Mapping[str, float]) -> str:
    """Describe bounds, as in `at least 0 and below 1`."""
    return " and ".join(f"{BOUNDS[name][0]} {bound:,}" for name, bound in bounds.items())


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to a mistyped name; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def describe_differences(recorded: dict[str, Any], requested: dict[str, Any]) -> str:
    """Describe the first requested settings that differ from the recorded ones; return "" if all are equal.

    Args:
        recorded: settings as JSON values. Keys that `requested` lacks are ignored.
        requested: settings as JSON values.
    """
    old = dict(_leaves({key: recorded.get(key) for key in requested}))
    new = dict(_leaves(requested))
    different = [
        f"{name} is {old.get(name)!r} there, but {new.get(name)!r} is requested"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
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
