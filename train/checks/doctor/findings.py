"""Result lines of the doctor: status, subject, message and how to fix it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mlm_common.errors import InputError, RunFailedError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    status: Status
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<8} {self.subject:<14} {' '.join(self.text.split())}"


def findings_of(subject: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield what a check finds; whatever it raises is an error of the subject, and the end of this check alone."""
    try:
        yield from check(*arguments)
    except (InputError, RunFailedError) as error:  # messages that say how to fix it
        yield Finding("error", subject, str(error))
    except Exception as error:
        text = f"could not be checked: {type(error).__name__}: {error}. Fix the errors above first."
        yield Finding("error", subject, text)


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """Make a finding that does not stop a run, but is probably not intended, slow, or will soon fail."""
    return Finding("warning", subject, f"{text} {fix}")


def error(subject: str, text: str, fix: str) -> Finding:
    return Finding("error", subject, f"{text} {fix}")
