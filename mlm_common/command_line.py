"""What the commands of all stages share: flags from dataclasses, one-line errors, the opening log line."""

import argparse
import dataclasses
import functools
import gc
import io
import logging
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from mlm_common.errors import EXIT_INTERRUPTED, EXIT_STOPPED, InputError, RunFailedError
from mlm_common.settings import spelled

logger = logging.getLogger(__name__)

PROJECT_FOLDER = Path(__file__).resolve().parent.parent

# Flags of transformers' scripts that people bring along.
NO_FLAGS = {
    "--do-train": "the command always trains",
    "--do-eval": "the command evaluates wherever there is a validation part",
}


def read_yaml_file(path: str | Path, flag: str) -> Any:
    """Read what a YAML or JSON file holds (JSON is YAML), which `flag` names.

    Raises:
        InputError: the file is missing, or holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{flag} must name a YAML or JSON file; {path} is not a file.")
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeysLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{flag} must hold YAML or JSON; {path}: {' '.join(str(error).split())}") from error


class _UniqueKeysLoader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is given twice", key.start_mark)
            seen.add(str(key.value))
        return node


def as_settings(content: Any, source: str) -> dict[str, Any]:
    """Take what a file holds for a mapping of flag to value, keys with `_` for `-`.

    Raises:
        InputError: it is something else, or names a flag in both spellings.
    """
    if not isinstance(content, dict):
        raise InputError(f"{source} holds {content!r}, where a mapping of flag to value must be.")
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise InputError(
            f"{source} must name each flag once, with `-` or with `_`; received {', '.join(map(str, content))}."
        )
    return settings


def parse_arguments(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None,
    description: str,
    layers: Mapping[str, Callable[[str], dict[str, Any]]] | None = None,
) -> tuple[Any, ...]:
    """Make one instance of each dataclass from the command line.

    Every field is a flag, spelled with `-` or `_`. Of its metadata `marks` is for others to read, all else argparse's.
    What is given later wins: the field's default, `layers` in their order, `--config-file`, the command line.

    Args:
        layers: {flag: what tells the settings {field: value} behind its value}, as those of a preset behind its name.

    Raises:
        InputError: an unknown key or a value of the wrong type in a settings file, or a check of the dataclasses that
            failed.
        SystemExit: from argparse, for an unknown flag, a value of the wrong type, or `--help`.
    """
    parser, flags = _build_parser(dataclass_types, description)
    parser.add_argument("--config-file", "--config_file", help="YAML or JSON file of flag: value; flags win over it.")

    config_file = parser.parse_known_args(argv)[0].config_file
    from_file = as_settings(read_yaml_file(config_file, "--config-file"), config_file) if config_file else {}
    given = _known_and_typed(flags, from_file, dataclass_types, str(config_file))
    for name, settings_of in reversed(list((layers or {}).items())):
        parser.set_defaults(**given)
        value = getattr(parser.parse_known_args(argv)[0], name)
        if value:
            given = _known_and_typed(flags, settings_of(value), dataclass_types, f"{name} {value}") | given
    parser.set_defaults(**given)
    return parser.parse_args_into_dataclasses(_reject_unknown(parser, argv), look_for_args_file=False)[:-1]


def typed_settings(dataclass_types: Sequence[type], settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Convert settings of a file, {flag: value}, to those of the dataclasses, {field name: value}.

    Raises:
        InputError: an unknown name, or a value that its flag does not take.
    """
    return _known_and_typed(_build_parser(dataclass_types, "")[1], settings, dataclass_types, source)


def _build_parser(dataclass_types: Sequence[type], description: str) -> tuple[Any, dict[str, argparse.Action]]:
    """Build a parser of the fields of dataclasses; also return its flags by the names of the fields."""
    # Costs half a second of `--help`, and importing it here spares those who only want InputError.
    from transformers.hf_argparser import HfArgumentParser

    flags: dict[str, argparse.Action] = {}

    class Parser(HfArgumentParser):
        def add_argument(self, *names: str, marks: Sequence[str] = (), **settings: Any) -> Any:  # noqa: ARG002
            if settings.get("type") is int:
                settings["type"] = whole_number
            if settings.get("type") is float:
                settings["type"] = finite_number
            action = super().add_argument(*names, **settings)
            flags.setdefault(action.dest, action)  # the flag before its complement, --no-…
            return action

    return Parser(dataclass_types, description=description, allow_abbrev=False), flags


def under_current_names(settings: dict[str, Any], dataclass_types: Sequence[type]) -> dict[str, Any]:
    """Rename settings given by an alias of their flag (the `aliases` of a field's metadata) to the field's name."""
    current = {
        alias.removeprefix("--").replace("-", "_"): field.name
        for dataclass_type in dataclass_types
        for field in dataclasses.fields(dataclass_type)
        for alias in field.metadata.get("aliases", ())
    }
    return {current.get(name, name): value for name, value in settings.items()}


def _known_and_typed(
    flags: dict[str, argparse.Action], settings: dict[str, Any], dataclass_types: Sequence[type], source: str
) -> dict[str, Any]:
    settings = under_current_names(settings, dataclass_types)
    names = {field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type)}
    unknown = sorted(set(settings) - names)
    if unknown:
        raise InputError(f"{source} may hold flags of this command only; unknown: {', '.join(unknown)}.")
    return {name: _typed(flags[name], value, source) for name, value in settings.items()}


def _typed(flag: argparse.Action, value: Any, source: str) -> Any:
    """Convert a setting of a file as the command line converts the words that follow its flag.

    Raises:
        InputError: it is none that the flag takes.
    """
    if value is None and flag.default is None:
        return None
    if flag.nargs == "+":
        return [_typed_item(flag, item, source) for item in (value if isinstance(value, list) else [value])]
    return _typed_item(flag, value, source)


def _typed_item(flag: argparse.Action, value: Any, source: str) -> Any:
    convert = flag.type if callable(flag.type) else str
    kinds: dict[Any, str] = {whole_number: "a whole number", finite_number: "a finite number", str: "text"}
    if isinstance(value, bool) and {"on", "off"} <= set(flag.choices or ()):
        value = "on" if value else "off"  # YAML takes these words for booleans
    try:
        if value is None or isinstance(value, list | dict) or (isinstance(value, bool) and convert in kinds):
            raise ValueError
        converted = convert(str(value))
        if flag.choices is not None and converted not in flag.choices:
            raise ValueError
    except (ValueError, argparse.ArgumentTypeError) as error:
        kind = f"one of {', '.join(map(str, flag.choices))}" if flag.choices else kinds.get(convert, "true or false")
        raise InputError(f"{source} must give {spelled(flag.dest)} {kind}; received {value!r}.") from error
    return converted


def whole_number(text: str) -> int:
    """Read a whole number, also one written as `3.0`, as transformers' scripts take epochs.

    Raises:
        ValueError: it is none.
    """
    return int(text.removesuffix(".0"))


whole_number.__name__ = "int"  # what argparse calls it


def finite_number(text: str) -> float:
    """Convert what is given for a flag that takes a number.

    Raises:
        argparse.ArgumentTypeError: it is none, or infinite, or `nan`, for which no flag has a use.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number; received {text}")
    return number


def _reject_unknown(parser: Any, argv: Sequence[str] | None) -> list[str]:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in NO_FLAGS and name not in parser._option_string_actions:
            raise InputError(f"{name} is not a flag here: {NO_FLAGS[name]}. Leave it out.")
    parser.parse_args(arguments)  # exits with argparse's own message, which names the flag
    return arguments


def command(main: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Make `main` a console command: logging set up, errors that explain themselves one line on stderr.

    The command returns the status for `sys.exit`: 0 when `main` came to its end, else one of `mlm_common.errors`. At
    its end it logs the time and the peak memory.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        # The request lines of the HTTP clients, and datasets' notes on its own files, hide what this run says.
        for chatty in ("httpx", "urllib3", "datasets", "filelock", "fsspec", "absl", "matplotlib"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for names of files that are not UTF-8
        # Looking for garbage among what TensorFlow and transformers make when they are imported takes a second.
        gc.set_threshold(10_000)
        started_seconds = time.monotonic()
        try:
            main(argv)
        except (InputError, RunFailedError) as error:
            is_stop = error.exit_status == EXIT_STOPPED  # which is what was asked for
            print(error if is_stop else f"error: {error}", file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        logger.info(
            "done in %.0f s, peak memory %.2f GB", time.monotonic() - started_seconds, peak_memory_bytes() / 1e9
        )
        return 0

    return run


def peak_memory_bytes() -> int:
    """Measure the most memory that this process, or one of its workers alone, has held at any time."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return (
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * unit_bytes
    )


def log_start(command_file: str) -> None:
    """Log where the command was imported from, the project's version and the commit of its checkout."""
    logger.info("%s, version %s, commit %s", Path(command_file).resolve(), version("mlm-pretraining"), commit())


def commit() -> str:
    """Find the checkout's commit, with `+changes` where files differ from it, or `unknown` outside a checkout."""
    git = ["git", "--no-optional-locks", "-C", str(PROJECT_FOLDER)]  # a kill must leave no lock behind
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, encoding="utf-8", check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
