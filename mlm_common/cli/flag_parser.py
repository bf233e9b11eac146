"""The parser of the commands: flags from dataclasses, help in groups, one line per mistake."""

import argparse
import functools
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from mlm_common.cli.console import add_verbose_flag
from mlm_common.cli.settings import nearest_name
from mlm_common.errors import InputError

USUAL_GROUP, LAST_GROUP = "Usual flags", "Other flags"
HELP_POSITION = 32
DASHES = "-\u2013\u2014"  # editors turn two hyphens into a dash

# Flags of transformers' scripts that do not exist here.
NO_FLAGS = {
    "--do-train": "the command always trains",
    "--do-eval": "the command evaluates whenever there is validation data",
}


@dataclass(frozen=True)
class Kind:
    """The type of a flag's value, as argparse's `type`; `name` completes "must be …", `read` converts the text."""

    name: str
    read: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        try:
            return self.read(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(f"must be {self.name}; received {text}") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _one_of(choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise ValueError(text)
    return text


def _whole_number_or(word: str, text: str) -> int | str:
    return word if text == word else int(WHOLE_NUMBER.read(text))


TEXT = Kind("text", str)
WHOLE_NUMBER = Kind(
    "a whole number", lambda text: int(text.removesuffix(".0"))
)  # transformers' scripts take 3.0 epochs
FINITE_NUMBER = Kind("a finite number", _finite)
TRUE_OR_FALSE = Kind("true or false", string_to_bool)
KINDS: dict[Any, Kind] = {int: WHOLE_NUMBER, float: FINITE_NUMBER, str: TEXT, string_to_bool: TRUE_OR_FALSE}
METAVARS: dict[Any, str] = {WHOLE_NUMBER: "N", FINITE_NUMBER: "X", TRUE_OR_FALSE: "true|false"}


class JoinedWords(argparse.Action):
    """Stores several words as one text."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        setattr(namespace, self.dest, joined_words(values))


def joined_words(words: Sequence[str]) -> str:
    """Join words as a shell would take them; a single one stays as it is, unless it could be taken for NAME=VALUE."""
    return words[0] if len(words) == 1 and "=" not in words[0] else shlex.join(words)


class FlagParser(HfArgumentParser):
    """Makes a flag for each field of dataclasses; `mlm_common.cli.settings.flag` describes fields and groups.

    flags: {field name: its flag}.
    """

    def __init__(
        self,
        dataclass_types: Sequence[type],
        description: str | None,
        needed: Sequence[str] = (),
        other_defaults: Mapping[str, str] | None = None,
    ) -> None:
        self.flags: dict[str, argparse.Action] = {}
        self._groups: dict[str, Any] = {}
        self._group_of_class = LAST_GROUP
        super().__init__(
            dataclass_types,
            description=description,
            allow_abbrev=False,
            add_help=False,
            exit_on_error=False,
            formatter_class=functools.partial(_HelpFormatter, other_defaults=other_defaults or {}),
        )
        self._group_of_class = LAST_GROUP
        self.add_argument(
            "--config-file",
            "--config_file",
            metavar="FILE",
            help="YAML or JSON file of flags; those you pass override it.",
        )
        add_verbose_flag(self)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")
        shown = [_invocation(self.flags[name]) for name in needed]
        self.usage = " ".join(["%(prog)s", *shown, "[flags]"])

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        self._group_named(USUAL_GROUP)
        self._group_of_class = getattr(dtype, "FLAG_GROUP", "Flags")
        super()._add_dataclass_arguments(dtype)

    def _group_named(self, title: str) -> Any:
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def add_argument(
        self,
        *names: str,
        marks: Sequence[str] = (),  # noqa: ARG002
        bounds: Mapping[str, float] | None = None,  # noqa: ARG002
        group: str | None = None,
        is_usual: bool = False,
        is_positional: bool = False,
        takes_several: bool = False,
        or_word: str | None = None,
        off_help: str | None = None,
        **settings: Any,
    ) -> Any:
        if is_positional:
            names, settings = (names[0].lstrip("-"),), settings | {"nargs": "*"}
        if takes_several:
            settings |= {"nargs": "+", "action": JoinedWords}
        if settings.get("action") == "store_false":
            settings["help"] = off_help
        elif settings.get("action", JoinedWords) is JoinedWords:
            choices = settings.pop("choices", None)
            settings["type"] = kind = (
                Kind(f"one of {', '.join(choices)}", functools.partial(_one_of, choices))
                if choices
                else KINDS.get(settings.get("type", str), settings.get("type"))
            )
            if or_word is not None:
                settings["type"] = Kind(f"a whole number or {or_word}", functools.partial(_whole_number_or, or_word))
                settings["metavar"] = f"N|{or_word}"
            settings.setdefault("metavar", "|".join(choices) if choices else METAVARS.get(kind) or _metavar(names[-1]))
        title = USUAL_GROUP if is_usual else group or self._group_of_class
        action = self._group_named(title).add_argument(*names, **settings)
        self.flags.setdefault(action.dest, action)  # the flag before its complement, --no-…
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; a flag without a value, or with one that it does not take, is an InputError."""
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            action = self._option_string_actions[str(error.argument_name).partition("/")[0]]
            if error.message.startswith("expected"):
                raise InputError(f"{_shown_name(action)} needs a value: {_invocation(action)}.") from error
            raise InputError(f"{_shown_name(action)} {error.message}.") from error

    def error(self, message: str) -> Any:
        """Raise InputError, instead of exiting as argparse does."""
        raise InputError(f"{message}. --help lists all flags.")

    def check_flags(self, arguments: Sequence[str]) -> None:
        """Check that all flags are known; an InputError names the first unknown one, and the nearest."""
        for argument in arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in NO_FLAGS and name not in self._option_string_actions:
                raise InputError(f"{name} is not a flag here: {NO_FLAGS[name]}. Leave it out.")
        unknown = self.parse_known_args(list(arguments))[1]
        if not unknown:
            return
        for argument in unknown:
            name = argument.partition("=")[0]
            if name[0:1] in tuple(DASHES) and name.strip(DASHES):
                raise InputError(f"unknown flag {name}{self.nearest(name)} (--help lists all)")
        raise InputError(
            f"unexpected argument {unknown[0]!r}: each value must follow its flag. --help lists all flags."
        )

    def nearest(self, name: str) -> str:
        """Name the flag that begins with `name` or is most like it, as "; did you mean …?"; empty where none is."""
        known = {_spelled_with_hyphens(option): option for option in self._option_string_actions if "_" not in option}
        typed = _spelled_with_hyphens(name)
        found = next((one for one in known if one.startswith(f"{typed}-")), None) or nearest_name(typed, known)
        return f"; did you mean {known[found]}?" if found else ""


def _spelled_with_hyphens(name: str) -> str:
    return name.lstrip(DASHES).replace("_", "-").lower()


def _metavar(name: str) -> str:
    last = re.split("[-_]", name)[-1]
    return {"dir": "DIR", "dataset": "DIR", "file": "FILE", "files": "FILE"}.get(last, "NAME")


def _shown_name(action: argparse.Action) -> str:
    """Return the spelling of a flag that is shown: with `-`, under its current name."""
    shown = (name for name in action.option_strings if name.startswith("--") and "_" not in name)
    return next(shown, str(action.metavar))


def _invocation(action: argparse.Action) -> str:
    name = _shown_name(action)
    if action.nargs == "*":
        return f'"{name}" …'
    if action.nargs in (0, "?"):
        return name
    return f"{name} {action.metavar}" + (" …" if action.nargs == "+" else "")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str, *, other_defaults: Mapping[str, str]) -> None:
        super().__init__(prog, max_help_position=HELP_POSITION)
        self._other_defaults = other_defaults

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # hyphens would break flags

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return _invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        own = "" if default is None or isinstance(default, bool | list) else str(default)
        if isinstance(default, float):
            own = f"{default:g}"
        if action.dest in self._other_defaults:
            own = ", else ".join(filter(None, [self._other_defaults[action.dest], own]))
        if not own or "Default:" in text or action.default is argparse.SUPPRESS:
            return text
        return f"{text} (default: {own.replace('%', '%%')})"
