"""Labels as a model has them: a class, several of them, or a number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
# More classes than this are no classes, but a column that was named by mistake.
MAX_CLASSES = 1000


@dataclass(frozen=True)
class Labels:
    """What a model tells apart.

    problem_type: in transformers' words.
    names: of the classes, by id; one for a number.
    """

    problem_type: ProblemType
    names: tuple[str, ...]

    @property
    def by_id(self) -> dict[int, str]:
        """Map each id to its name, as a configuration of transformers does."""
        return dict(enumerate(self.names))

    def encode(self, values: Sequence[Any], where: str) -> NDArray[Any]:
        """Make labels an array: int32 (rows,) of classes, float32 (rows, classes) of 0 and 1, or float32 (rows,).

        Raises:
            InputError: a label that is missing, unknown, or no number.
        """
        rows = [self._encoded(value, f"row {row:,} of {where}") for row, value in enumerate(values, start=1)]
        return np.array(rows, np.int32 if self.problem_type == "single_label_classification" else np.float32)

    def nothing(self, num_rows: int) -> NDArray[Any]:
        """Make an array of the form of `encode` for rows without labels."""
        if self.problem_type == "multi_label_classification":
            return np.zeros((num_rows, len(self.names)), np.float32)
        return np.zeros(num_rows, np.int32 if self.problem_type == "single_label_classification" else np.float32)

    def _encoded(self, value: Any, place: str) -> Any:
        if self.problem_type == "multi_label_classification":
            ids = [self._id(one, place) for one in value]
            return [float(index in ids) for index in range(len(self.names))]
        if is_missing(value):
            raise InputError(f"Each row to train or evaluate on must have a label; {place} has none.")
        return _number(value, place) if self.problem_type == "regression" else self._id(value, place)

    def _id(self, value: Any, place: str) -> int:
        name = label_name(value)
        if name not in self.names:
            known = ", ".join(self.names[:10]) + (" …" if len(self.names) > 10 else "")
            raise InputError(f"Each label must be one of the training part's: {known}; {place} has {name!r}.")
        return self.names.index(name)


def find_labels(
    values: Sequence[Any], where: str, problem_type: ProblemType | None, known: Mapping[int, str] | None = None
) -> Labels:
    """Find what the labels to train on tell apart.

    Args:
        values: of the rows to train on.
        where: they stand.
        problem_type: by default what the values look like.
        known: {id: name} of the model to start from, whose order is kept if it has the same names.

    Raises:
        InputError: there are not two classes, or too many.
    """
    problem_type = problem_type or _problem_type(values)
    if problem_type == "regression":
        return Labels(problem_type, ("score",))
    flat = values if problem_type == "single_label_classification" else [one for value in values for one in value]
    found = {label_name(value) for value in flat if not is_missing(value)}
    if known is not None and set(known.values()) == found:
        return Labels(problem_type, tuple(known[index] for index in sorted(known)))
    names = tuple(sorted(found, key=_in_order))
    if (len(names) < 2 and problem_type == "single_label_classification") or not names:
        raise InputError(f"Labels must be of two classes at least; all in {where} are {', '.join(names) or 'missing'}.")
    if len(names) > MAX_CLASSES:
        raise InputError(
            f"Labels must be of at most {MAX_CLASSES} classes; those in {where} are of {len(names):,}. Name their "
            "column by --label-column-name, or give --problem-type regression for numbers."
        )
    return Labels(problem_type, names)


def label_name(value: Any) -> str:
    """Name a class by what stands in a table; 1.0 is 1, as where a column with gaps was read as numbers."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_missing(value: Any) -> bool:
    """Tell whether a table has nothing where a label should be."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _problem_type(values: Sequence[Any]) -> ProblemType:
    if any(isinstance(value, list | tuple) for value in values):
        return "multi_label_classification"
    numbers = [_as_number(value) for value in values if not is_missing(value)]
    is_regression = all(number is not None for number in numbers) and any(
        number is not None and not number.is_integer() for number in numbers
    )
    return "regression" if is_regression else "single_label_classification"


def _as_number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _number(value: Any, place: str) -> float:
    number = _as_number(value)
    if number is None or not math.isfinite(number):
        raise InputError(f"Each label of a regression must be a number; {place} has {value!r}.")
    return number


def _in_order(name: str) -> tuple[float, str]:
    """Sort whole numbers by their value, and before all else."""
    return (float(name), name) if name.lstrip("-").isdecimal() else (math.inf, name)
