"""Run a command: read its settings from flags and files, print each error on one line, and log its start and end."""

import argparse
import functools
import gc
import logging
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from mlm_common.cli import PROJECT_FOLDER
from mlm_common.cli.console import set_up_console
from mlm_common.cli.flag_parser import FINITE_NUMBER, TEXT, WHOLE_NUMBER, FlagParser, JoinedWords, joined_words
from mlm_common.cli.process import (
    describe_interrupt,
    interruptible,
    keep,
    run_as_script,
    seconds_of_script,
)
from mlm_common.cli.settings import flag_of
from mlm_common.errors import EXIT_FAILED, EXIT_STOPPED, InputError, RunFailedError
from mlm_common.storage.guard import guarded_read

logger = logging.getLogger(__name__)

# If the message of an exception, from any library, contains one of these texts, the disk is full.
DISK_FULL = ("No space left on device", "Disk quota exceeded")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def read_yaml_file(path: str | Path, flag: str) -> Any:
    """Read a YAML or JSON file; JSON is also valid YAML. Errors name `flag`."""
    with guarded_read(path, "a YAML or JSON file", flag=flag):
        try:
            return yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeysLoader)
        except yaml.YAMLError as error:
            raise InputError(f"{flag} must be a YAML or JSON file; {path}: {' '.join(str(error).split())}") from error


class _UniqueKeysLoader(yaml.SafeLoader):
    """Rejects duplicate keys, for which PyYAML would silently use the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is given twice", key.start_mark)
            seen.add(str(key.value))
        return node


def as_settings(content: Any, source: str) -> dict[str, Any]:
    """Check that the content of a file maps flags to values, and return it with `-` replaced by `_` in the names."""
    if not isinstance(content, dict):
        raise InputError(f"{source} must map flags to values; it contains {content!r}.")
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise InputError(
            f"{source} must name each flag only once, either with `-` or with `_`; received "
            f"{', '.join(map(str, content))}."
        )
    return settings


def parse_arguments(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None,
    description: str | None,
    layers: Mapping[str, Callable[[str], dict[str, Any]]] | None = None,
    *,
    needed: Sequence[str] = (),
    other_defaults: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Make one instance of each dataclass from the command line.

    Every field is a flag, spelled with `-` or `_`. Values come from these sources, and later sources override earlier
    ones: the default of the field, `layers` in their order, `--config-file`, and the command line.

    Args:
        dataclass_types: dataclasses whose fields are made by `mlm_common.cli.settings.flag`.
        argv: words of the command line; default: the words of this process's command line.
        description: text at the top of `--help`. Text after a line `Examples:` is shown below the flags.
        layers: {flag: function that converts the flag's value into settings {field: value}}. For example, a function
            converts the name of a preset into the preset's settings.
        needed: names of the fields that the usage line shows, and that come first in `--help`.
        other_defaults: {field name: description of the field's default}. `--help` shows it for fields whose default
            comes from `layers`.

    Raises:
        InputError: a flag or key is unknown, a value has the wrong type, or a check of a dataclass failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = FlagParser(dataclass_types, description, needed, other_defaults)
    config_file = parser.parse_known_args(arguments)[0].config_file
    from_file = as_settings(read_yaml_file(config_file, "--config-file"), config_file) if config_file else {}
    given = _known_and_typed(parser, from_file, str(config_file))
    for name, settings_of in reversed(list((layers or {}).items())):
        parser.set_defaults(**given)
        values = vars(parser.parse_known_args(arguments)[0])
        if value := values[name]:
            layer = _known_and_typed(parser, settings_of(value), f"{name} {value}")
            ignored = {other for field, other in parser.replaced.items() if values[field] is not None}
            owners = {owner for owner, _ in parser.belongs_to.values()}
            parser.set_defaults(**{field: layer[field] for field in owners & layer.keys() - given.keys()})
            values = vars(parser.parse_known_args(arguments)[0])
            ignored |= {field for field, (owner, value) in parser.belongs_to.items() if values[owner] != value}
            given = {field: layer[field] for field in layer if field not in ignored} | given
    parser.set_defaults(**given)
    return parser.parse_dataclasses(arguments)


def typed_settings(dataclass_types: Sequence[type], settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Convert settings from a file, {flag: value}, to settings of the dataclasses, {field name: value}."""
    return _known_and_typed(FlagParser(dataclass_types, None), settings, source)


def _known_and_typed(parser: FlagParser, settings: dict[str, Any], source: str) -> dict[str, Any]:
    typed = {}
    for name, value in settings.items():
        if name not in parser.flags:
            raise InputError(f"{source}: unknown flag {name}{parser.nearest(name)} (--help-all lists all)")
        typed[parser.flags[name].dest] = _typed(parser.flags[name], value, source)
    return typed


def _typed(flag: argparse.Action, value: Any, source: str) -> Any:
    """Convert a setting from a file in the same way as the words after its flag on the command line."""
    kind: Any = flag.type

    def convert(item: Any) -> Any:
        if isinstance(item, bool) and "on|off" in str(flag.metavar):
            item = "on" if item else "off"  # YAML reads these words as booleans
        is_other_type = item is None or isinstance(item, list | dict)
        try:
            if is_other_type or (isinstance(item, bool) and kind in (FINITE_NUMBER, TEXT, WHOLE_NUMBER)):
                raise argparse.ArgumentTypeError
            return kind(str(item))
        except argparse.ArgumentTypeError as error:
            raise InputError(f"{source}: {flag_of(flag.dest)} must be {kind.name}; received {item!r}.") from error

    if value is None and flag.default is None:
        return None
    is_joined = isinstance(flag, JoinedWords) and isinstance(value, str)
    if flag.nargs in ("+", "*") and not is_joined:
        if isinstance(value, dict):  # written as NAME=VALUE on the command line
            lists = {name: item if isinstance(item, list) else [item] for name, item in value.items()}
            value = [f"{name}={convert(item)}" for name, items in lists.items() for item in items]
        words = [convert(item) for item in (value if isinstance(value, list) else [value])]
        return joined_words(words) if isinstance(flag, JoinedWords) else words
    return convert(value)


def command(main: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Make `main` a console command.

    The command sets up logging, prints expected errors and Ctrl-C as one line on standard error, and logs its time and
    peak memory at the end. The command returns the status for `run_as_script`: 0 after success, or else one of the
    statuses in `mlm_common.errors`.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        set_up_console(sys.argv[1:] if argv is None else argv)
        # With the default threshold, garbage collection during the imports of TensorFlow and transformers takes a
        # second.
        gc.set_threshold(10_000)
        started_seconds = time.monotonic()
        with interruptible() as interrupts:
            try:
                main(argv)
            except (KeyboardInterrupt, Exception) as error:
                keep(error)
                # Any other error after an interrupt is a consequence of the interrupt: C++ code and guards replace the
                # KeyboardInterrupt with errors of other types.
                if interrupts or isinstance(error, KeyboardInterrupt):
                    return describe_interrupt(interrupts)
                return _describe_error(error)
        seconds = seconds_of_script() or time.monotonic() - started_seconds
        logger.info("Done in %.0f s; peak memory %.2f GB.", seconds, peak_memory_bytes() / 1e9)
        return 0

    run.as_script = functools.partial(run_as_script, run)  # type: ignore[attr-defined] # pyproject.toml names it
    return run


def _describe_error(error: Exception) -> int:
    """Print an expected error on one line, and return its exit status. Raise any other error."""
    if isinstance(error, InputError | RunFailedError):
        # File names may contain control characters. Such characters are escaped, so that a message is one line of plain
        # text.
        message = _CONTROL.sub(lambda match: repr(match.group())[1:-1], str(error))
        is_stop = error.exit_status == EXIT_STOPPED  # not an error, but a shutdown request
        print(error if is_stop else f"error: {message}", file=sys.stderr)
        return error.exit_status
    if not any(reason in str(error) for reason in DISK_FULL):
        raise
    print(f"error: {' '.join(str(error).split())}. Free some space, then run the command again.", file=sys.stderr)
    return EXIT_FAILED


def peak_memory_bytes() -> int:
    """Return the peak memory of this process or of its largest worker, whichever is larger."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return (
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * unit_bytes
    )


def log_start(command_file: str) -> None:
    """Log the command's file, the project's version, and the commit of the checkout."""
    path = Path(command_file).resolve()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    logger.info("%s, version %s, commit %s", shown, version("mlm-pretraining"), commit())


def commit() -> str:
    """Return the commit of the checkout, followed by `+changes` if tracked files differ from it.

    Outside a checkout, return `unknown`.
    """
    # Without locks, which would remain if git were killed.
    git = ["git", "--no-optional-locks", "-C", str(PROJECT_FOLDER)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, encoding="utf-8", check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changes = subprocess.run(status, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
