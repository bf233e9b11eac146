"""The command-line parser: makes flags from dataclasses, groups the help, and reports each mistake on one line."""

import argparse
import dataclasses
import functools
import itertools
import math
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mlm_common.cli.console import add_verbose_flag
from mlm_common.cli.settings import flag_of, nearest_name
from mlm_common.errors import InputError

USUAL_GROUP, LAST_GROUP = "Usual flags", "Other flags"
EXAMPLES = "\n\nExamples:\n"  # the examples follow this line of a description
HELP_POSITION = 32
# Placeholders in `--help`, by the last word of the flag's name.
METAVARS = {
    "dir": "DIR",
    "dataset": "DIR",
    "file": "FILE",
    "files": "FILE",
    "output": "FILE",
    "task": "FILE.py:CLASS",
}
# Words in the placeholders of flags that take paths.
PATH_WORDS = {"DIR", "FILE", "MODEL"}
DASHES = "-\u2013\u2014"  # editors turn two hyphens into a dash

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")

# Flags of transformers' scripts that this project does not need, and why.
NO_FLAGS = {
    "--do-train": "the command always trains",
    "--do-eval": "the command evaluates whenever there is validation data",
    "--eval-strategy": "the command evaluates every --eval-steps",
    "--evaluation-strategy": "the command evaluates every --eval-steps",
    "--save-strategy": "the command saves every --save-steps",
    "--resume-from-checkpoint": "the same command resumes from the newest checkpoint",
    "--fp16": "--bfloat16 computes in bfloat16",
    "--deepspeed": "--shard-optimizer divides the optimizer among the replicas",
    "--fsdp": "--shard-optimizer divides the optimizer among the replicas",
    "--packing": "prepare_tfrecord_shards.py --chunking packed packs the rows",
}
# {flag of transformers' scripts: flag of this project with the same meaning}, for hints. docs/guides/migrating.md lists
# them.
TRAINER_FLAGS = {
    "--model-name-or-path": "--init-from",
    "--config-name": "--pretrained-model-config",
    "--tokenizer-name": "--tokenizer",
    "--max-seq-length": "--max-length",
    "--per-device-train-batch-size": "--per-replica-batch-size",
    "--num-train-epochs": "--num-epochs",
    "--weight-decay": "--weight-decay-rate",
    "--lr-scheduler-type": "--schedule",
    "--optim": "--optimizer",
    "--bf16": "--bfloat16",
    "--logging-steps": "--log-steps",
    "--save-total-limit": "--keep-checkpoints",
    "--push-to-hub": "--hub-model-id",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of a flag's value, to pass to argparse as `type`.

    Attributes:
        name: completes the sentence "must be …".
        read: converts the text; raises ValueError if it cannot.
        metavar: placeholder in `--help`.
    """

    name: str
    read: Callable[[str], Any]
    metavar: str | None = None

    def __call__(self, text: str) -> Any:
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {self.name}; received {text}") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _true_or_false(text: str) -> bool:
    _one_of((*TRUE_WORDS, *FALSE_WORDS), text.lower())
    return text.lower() in TRUE_WORDS


def _one_of(choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise ValueError(text)
    return text


def _whole_number_or(word: str, text: str) -> int | str:
    return word if text == word else int(WHOLE_NUMBER.read(text))


TEXT = Kind("text", str)
# 3.0 is accepted, because the scripts of transformers accept it for epochs.
WHOLE_NUMBER = Kind("a whole number", lambda text: int(text.removesuffix(".0")), "N")
FINITE_NUMBER = Kind("a finite number", _finite, "X")
TRUE_OR_FALSE = Kind("true or false", _true_or_false, "true|false")
KINDS: dict[Any, Kind] = {int: WHOLE_NUMBER, float: FINITE_NUMBER, str: TEXT, bool: TRUE_OR_FALSE}


def _kind_of(type_: Any) -> Kind:
    """Choose how to read a value of a type. A value of `X | None` or `list[X]` is read as X."""
    if get_origin(type_) is Literal:
        choices = get_args(type_)
        return Kind(f"one of {', '.join(choices)}", functools.partial(_one_of, choices), "|".join(choices))
    inner = [argument for argument in get_args(type_) if argument is not NoneType]
    return _kind_of(inner[0]) if inner else KINDS[type_]


class JoinedWords(argparse.Action):
    """Stores several words as one text, joined by `joined_words`."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        setattr(namespace, self.dest, joined_words(values))


def joined_words(words: Sequence[str]) -> str:
    """Join words, quoted as for a shell. A single word stays unchanged, unless it could be taken for NAME=VALUE."""
    return words[0] if len(words) == 1 and "=" not in words[0] else shlex.join(words)


class FlagParser(argparse.ArgumentParser):
    """Makes a flag for each field of dataclasses. `mlm_common.cli.settings.flag` describes the fields and groups.

    Without dataclasses, the caller adds its flags and arguments, each with a metavar if it takes a value.

    Attributes:
        examples: commands, from the end of the description; empty if there are none.
        flags: {name of a field, or an alias of its flag, spelled with `_`: argparse's action}.
        replaced: {field name: name of the field that it replaces}.
        belongs_to: {field name: (other field, value)}. A preset's value for this field is ignored unless the other
            field has the value given here.
    """

    def __init__(
        self,
        dataclass_types: Sequence[type],
        description: str | None,
        needed: Sequence[str] = (),
        other_defaults: Mapping[str, str] | None = None,
    ) -> None:
        text, _, self.examples = (description or "").partition(EXAMPLES)
        self.examples = textwrap.dedent(self.examples).rstrip()
        super().__init__(
            description=text,
            allow_abbrev=False,
            add_help=False,
            exit_on_error=False,
            formatter_class=functools.partial(_HelpFormatter, other_defaults=other_defaults or {}),
        )
        self.flags: dict[str, argparse.Action] = {}
        self.replaced: dict[str, str] = {}
        self.belongs_to: dict[str, tuple[str, Any]] = {}
        self._dataclass_types = dataclass_types
        self._words: list[str] = []  # the command line
        self._groups: dict[str, Any] = {}
        self._group_named(USUAL_GROUP)
        for dataclass_type in dataclass_types:
            types, group = get_type_hints(dataclass_type), getattr(dataclass_type, "FLAG_GROUP", "Flags")
            self._group_named(group)  # first, so that it comes before the groups that individual fields name
            for field in dataclasses.fields(dataclass_type):
                if field.init:
                    self._add_flag(field, types[field.name], group)
        others = self._group_named(LAST_GROUP)
        if dataclass_types:
            others.add_argument(
                "--config-file",
                "--config_file",
                metavar="FILE",
                help="YAML or JSON file with flags. Flags on the command line override it.",
            )
            shown = [_invocation(self.flags[name]) for name in needed]
            self.usage = " ".join(["%(prog)s", *shown, "[flags]"])
        add_verbose_flag(others)
        others.add_argument("-h", "--help", action="help", help="Show the usual flags and exit.")
        others.add_argument("--help-all", "--help_all", action=_AllHelp, nargs=0, help="Show all flags and exit.")
        usual: list[argparse.Action] = self._groups[USUAL_GROUP]._group_actions
        usual.sort(key=lambda action: action.dest not in needed)
        # If no flag is marked as usual, the command has few flags, and --help shows all of them.
        self._hidden = [action for action in self._actions if action not in usual] if usual else []

    def _group_named(self, title: str) -> Any:
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def _add_flag(self, field: dataclasses.Field[Any], type_: Any, group_of_class: str) -> None:
        metadata, default = field.metadata, field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        names = [f"--{field.name}", flag_of(field.name), *metadata.get("aliases", ())]
        kind = _kind_of(type_)
        if word := metadata.get("or_word"):
            kind = Kind(f"a whole number or {word}", functools.partial(_whole_number_or, word), f"N|{word}")
        settings: dict[str, Any] = {"type": kind, "help": metadata.get("help")}
        settings |= {"required": True} if default is dataclasses.MISSING else {"default": default}
        last_word = re.split("[-_]", names[-1])[-1]
        settings["metavar"] = metadata.get("metavar") or kind.metavar or METAVARS.get(last_word, "NAME")
        if metadata.get("is_positional"):
            names, settings["nargs"] = [field.name], "*"
        elif metadata.get("takes_several"):
            settings |= {"nargs": "+", "action": JoinedWords}
        elif get_origin(type_) is list:
            settings["nargs"] = "+"
        elif type_ is bool:
            settings |= {"nargs": "?", "const": True}
        group = self._group_named(USUAL_GROUP if metadata.get("is_usual") else metadata.get("group") or group_of_class)
        action = group.add_argument(*dict.fromkeys(names), **settings)
        self.flags |= {name.lstrip("-").replace("-", "_"): action for name in names}
        self.replaced |= {field.name: metadata["replaces"]} if "replaces" in metadata else {}
        self.belongs_to |= {field.name: metadata["belongs_to"]} if "belongs_to" in metadata else {}
        if type_ is bool and default is True:
            off: dict[str, Any] = {"action": "store_false", "dest": field.name, "help": metadata.get("off_help")}
            group.add_argument(f"--no_{field.name}", flag_of(f"no_{field.name}"), **off)

    def format_help(self) -> str:
        """Format the help: the examples, and either all flags, or the usual flags and a line on how to see the rest."""
        examples = f"\nExamples:\n{textwrap.indent(self.examples, '  ')}\n" if self.examples else ""
        if not self._hidden:
            return super().format_help() + examples
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        formatter.start_section(USUAL_GROUP)
        formatter.add_arguments(self._groups[USUAL_GROUP]._group_actions)
        formatter.end_section()
        footer = (
            f"{len(self._hidden)} more flags: --help-all, or this command's page on the site that `make docs` builds."
        )
        return f"{formatter.format_help()}{examples}\n{textwrap.fill(footer, 78)}\n"

    def show_all(self) -> None:
        """Make `format_help` show all flags."""
        self._hidden = []

    def parse_dataclasses(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """Make an instance of each dataclass from the command line.

        Raises:
            InputError: a flag is unknown, or has a value that it does not accept.
        """
        values = vars(self.parse_args(arguments))
        for action in self.flags.values():
            value = values.get(action.dest)
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str) and not item.isascii():
                    _check_unicode(item, action)
        return tuple(
            dataclass_type(
                **{field.name: values[field.name] for field in dataclasses.fields(dataclass_type) if field.init}
            )
            for dataclass_type in self._dataclass_types
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does.

        Raises:
            InputError: a flag is unknown, lacks a value, or has a value that it does not accept.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise self._unknown(unknown)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does.

        Raises:
            InputError: a flag lacks a value, or has a value that it does not accept.
        """
        self._words = list(args or [])
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            if error.argument_name is None:  # a required flag is missing, in Python 3.13 and later
                self.error(error.message)
            action = self._option_string_actions[str(error.argument_name).partition("/")[0]]
            if error.message.startswith("expected"):
                raise InputError(f"{_shown_name(action)} needs a value: {_invocation(action)}.") from error
            raise InputError(f"{_shown_name(action)} {error.message}.") from error

    def error(self, message: str) -> Any:
        """Raise an InputError. argparse would exit.

        If a single flag is required, and the command line starts with values, the message suggests the flag for them.
        """
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), self._words))
        required = [action for action in self._actions if action.required and action.option_strings]
        hint = "."
        if values and len(required) == 1:
            values = values if required[0].nargs == "+" else values[:1]
            hint = f"; did you mean {_shown_name(required[0])} {shlex.join(values)}?"
        raise InputError(f"{message}{hint} --help-all lists all flags.")

    def _unknown(self, words: Sequence[str]) -> InputError:
        """Make the error for unknown words. It names all unknown flags, or the first word if no word is a flag."""
        starts = [word.partition("=")[0] for word in words]
        names = list(dict.fromkeys(name for name in starts if name.startswith(tuple(DASHES)) and name.strip(DASHES)))
        hints = {name: self.nearest(name) for name in names}
        if len(names) == 1:
            return InputError(f"unknown flag {names[0]}{hints[names[0]]} (--help-all lists all)")
        if names:
            shown = ", ".join(f"{name} ({hint.removeprefix('; ')})" if hint else name for name, hint in hints.items())
            return InputError(f"unknown flags: {shown}. --help-all lists all flags.")
        arguments = " ".join(_invocation(action) for action in self._actions if not action.option_strings)
        rule = "each value must follow its flag"
        if arguments:
            rule = f"the arguments without a flag must be {arguments}, next to each other"
        return InputError(f"unexpected argument {words[0]!r}: {rule}. --help-all lists all flags.")

    def nearest(self, name: str) -> str:
        """Return "; did you mean …?" with the flag that `name` probably stands for; an empty string if no flag fits.

        This is the flag that means what `name` means in transformers' scripts, else a flag that starts with `name`,
        else the most similar flag, else a flag whose words have these initials. For a flag that this project does not
        need, the text says to leave it out.
        """
        options = {_spelled_with_hyphens(option): option for option in self._option_string_actions if "_" not in option}
        typed = _spelled_with_hyphens(name)
        if reason := NO_FLAGS.get(f"--{typed}"):
            return f"; leave it out: {reason}"
        translated = _spelled_with_hyphens(TRAINER_FLAGS.get(f"--{typed}", ""))
        longer = next((spelling for spelling in options if spelling.startswith(f"{typed}-")), None)
        initials = next((name for name in options if "".join(word[0] for word in name.split("-")) == typed), None)
        nearest = translated if translated in options else longer or nearest_name(typed, options) or initials
        return f"; did you mean {options[nearest]}?" if nearest else ""


def _check_unicode(text: str, action: argparse.Action) -> None:
    """Reject a value with bytes that are not UTF-8 or with halves of surrogate pairs, unless it is a path.

    Raises:
        InputError: the value is not valid Unicode.
    """
    if PATH_WORDS & set(re.findall("[A-Z]+", str(action.metavar))) or os.path.lexists(text):
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a character, U+{code:04X},"
        raise InputError(
            f"{_shown_name(action)} must be text in UTF-8; {problem} in {text!a} is not. Type it again or convert it."
        ) from error


def _spelled_with_hyphens(name: str) -> str:
    return name.lstrip(DASHES).replace("_", "-").lower()


def _shown_name(action: argparse.Action) -> str:
    """Return the name of a flag to show, spelled with `-`."""
    shown = (name for name in action.option_strings if name.startswith("--") and "_" not in name)
    return next(shown, str(action.metavar))


def _invocation(action: argparse.Action) -> str:
    name = _shown_name(action)
    if action.nargs == "*":
        return f'"{name}" …'
    if action.nargs in (0, "?"):
        return name
    value = f"{name} {action.metavar}" if action.option_strings else name
    return value + (" …" if action.nargs == "+" else "")


class _AllHelp(argparse.Action):
    """Shows all flags, and ends the process."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.show_all()
        parser.print_help()
        parser.exit()


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
        shown = "" if default is None or isinstance(default, bool | list) else str(default)
        if isinstance(default, float):
            shown = f"{default:g}"
        if action.dest in self._other_defaults:
            shown = ", else ".join(filter(None, [self._other_defaults[action.dest], shown]))
        if not shown or "Default:" in text or action.default is argparse.SUPPRESS:
            return text
        return f"{text} (default: {shown.replace('%', '%%')})"
