"""Fields of the settings: flags with their help, and the rules that they must meet."""

from dataclasses import field
from typing import Any

from tokenizer_training.command_line import InputError


def flag(default: Any, help_text: str) -> Any:
    """Return a dataclass field that is a flag of this default and help."""
    return field(default=default, metadata={"help": help_text.replace("%", "%%")})  # argparse formats its help


def require(holds: bool, rule: str, flag_name: str, received: object) -> None:
    """Refuse a setting whose rule does not hold.

    Raises:
        InputError: names the flag, the rule and what was received.
    """
    if not holds:
        raise InputError(f"{flag_name} {rule}; received {received}.")
