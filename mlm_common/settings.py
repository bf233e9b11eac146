"""Settings as fields of dataclasses: each is a flag with its help, and the rules that it must meet."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

from mlm_common.errors import InputError


def flag(default: Any, help_text: str, *marks: str, former_name: str | None = None) -> Any:
    """Make a dataclass field that is a flag.

    Args:
        default: of the field; `list` for an empty one.
        help_text: of the flag.
        marks: words that others read of the setting.
        former_name: under which it is read, too.
    """
    metadata: dict[str, Any] = {"help": help_text.replace("%", "%%"), "marks": marks}  # argparse formats its help
    if former_name is not None:
        metadata["aliases"] = [f"--{former_name}"]
    if default is list:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(holds: bool, rule: str, flag_name: str, received: object) -> None:
    """Refuse a setting whose rule does not hold.

    Raises:
        InputError: names the flag, the rule and what was received.
    """
    if not holds:
        raise InputError(f"{flag_name} {rule}; received {received}.")


def require_each(config: Any, names: str, holds: Callable[[Any], bool], rule: str) -> None:
    """Refuse the first setting among `names` that is given and whose rule does not hold.

    Raises:
        InputError: names the flag, the rule and what was received.
    """
    for name in names.split():
        value = getattr(config, name)
        require(value is None or holds(value), rule, spelled(name), value)


def spelled(name: str) -> str:
    """Spell a field's name as its flag."""
    return f"--{name.replace('_', '-')}"
