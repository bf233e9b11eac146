"""What the labels of a table mean: one class a row, several classes, or a number; one reader for all formats and tasks.

`find_labels` decides by the training part, refuses what can be read in two ways, and says which flag decides.
"""

import functools
import math
import numbers
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
# More classes than this are no classes, but a column that was named by mistake.
MAX_CLASSES = 1000
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Classes that a plan lists.
MAX_LISTED = 12
# Written instead of a class where there is none.
NO_LABEL = ("-1", "?")
# Written among numbers where one is missing.
MISSING_WORDS = frozenset((
    "nan", "na", "n/a", "n.a.", "k.a.", "null", "none", "nil", "missing", "-", "--", "?", ".", "..", "inf", "+inf",
    "-inf", "infinity", "-infinity", "#n/a", "#na", "#nv", "#div/0!", "#value!", "#wert!", "#ref!", "#bezug!", "#name?",
    "#num!", "#zahl!", "#null!",
))  # fmt: skip
# Other characters that tables use between several labels of a row, like --label-separator.
SEPARATORS = (";", "|")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# As people and spreadsheets write numbers: with thousands, a decimal comma, or as percentages.
_AS_WRITTEN = re.compile(
    r"(?=.*\d)[+-]?(\d{1,3}([.,' \u00a0\u202f]\d{3})+|\d+)?([.,]\d+)?([eE][+-]?\d+)? ?%?", re.ASCII
)
_BINARY = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1}
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)(\.0*)?", re.ASCII)


@dataclass(frozen=True)
class LabelReading:
    """How labels are read that have two readings: the flags of these names; None where the values decide."""

    problem_type: ProblemType | None = None
    label_separator: str = ","
    decimal_separator: Literal[".", ","] = "."
    label_lists: Literal["names", "vectors"] | None = None
    similar_labels: Literal["merge", "keep"] | None = None


@dataclass(frozen=True)
class Labels:
    """What a model learns to predict.

    problem_type: in transformers' words.
    names: of the classes, by id; one for a number.
    reading: how labels were read to find them.
    """

    problem_type: ProblemType
    names: tuple[str, ...]
    reading: LabelReading = field(default_factory=LabelReading)

    @property
    def by_id(self) -> dict[int, str]:
        return dict(enumerate(self.names))

    def encode(self, values: Sequence[Any], where: str) -> NDArray[Any]:
        """Make labels an array: int32 (rows,) of classes, float32 (rows, classes) of 0 and 1, or float32 (rows,)."""
        encoded = self.nothing(len(values))
        for row, value in enumerate(values):
            encoded[row] = self._encoded(value, f"row {row + 1:,} of {where}")
        return encoded

    def encode_to_score(self, values: Sequence[Any], where: str) -> "ScoredLabels":
        """Make labels of rows to predict an array as `encode` does, with ids above the classes for unseen ones.

        A label that is missing, or `-1` or `?` where that is no class, is none. One that training does not have is what
        no prediction can be; one that differs from a class in white space or case alone is an InputError.
        """
        is_labelled = np.array([not self._is_unlabelled(value) for value in values], bool)
        places = [f"row {row:,} of {where}" for row in range(1, len(values) + 1)]
        several = self.problem_type == "multi_label_classification"
        if self.problem_type == "regression" or self.reading.label_lists == "vectors":
            encoded = self.nothing(len(values))
            for row in np.flatnonzero(is_labelled).tolist():
                encoded[row] = self._encoded(values[row], places[row])
            return ScoredLabels(encoded, is_labelled, ())
        seen, ids = dict(self._ids), []
        for value, place, has_label in zip(values, places, is_labelled, strict=True):
            found = _label_list(value, self.reading, place) if several and has_label else [value] if has_label else []
            ids.append([self._id(one, place, seen) for one in found])
        if several:
            encoded = np.zeros((len(values), len(seen)), np.float32)
            for of_row, row_ids in zip(encoded, ids, strict=True):
                of_row[row_ids] = 1
        else:
            encoded = np.array([of_row[0] if of_row else 0 for of_row in ids], np.int32)
        return ScoredLabels(encoded, is_labelled, tuple(seen)[len(self.names) :])

    def _is_unlabelled(self, value: Any) -> bool:
        if self.problem_type == "multi_label_classification":
            value = value[0] if _is_list(value) and len(value) == 1 else value
            is_none = value is None or (value != value) is True
        else:
            is_none = is_missing(value)
        if is_none or (not isinstance(value, str | numbers.Number) or isinstance(value, bool)):
            return bool(is_none)
        text = str(value).strip()
        if self.problem_type == "regression":
            return text.casefold() in MISSING_WORDS
        return text in NO_LABEL and text not in self._ids

    def nothing(self, num_rows: int) -> NDArray[Any]:
        if self.problem_type == "multi_label_classification":
            return np.zeros((num_rows, len(self.names)), np.float32)
        return np.zeros(num_rows, np.int32 if self.problem_type == "single_label_classification" else np.float32)

    def describe(self, encoded: NDArray[Any]) -> dict[str, str]:
        """Describe labels of `encode` in the plan of a run: their kind, and how often each class occurs."""
        if self.problem_type == "regression":
            spread = f"{encoded.min():.6g} to {encoded.max():.6g}, mean {encoded.mean():.6g}"
            return {"kind of label": "a number", "numbers": spread}
        if self.problem_type == "single_label_classification":
            kind = "one class"
            fractions = np.bincount(encoded, minlength=len(self.names)) / max(1, len(encoded))
        else:
            kind = f"several classes, {encoded.sum() / max(1, len(encoded)):.2f} on average"
            fractions = encoded.mean(axis=0)
        listed = [f"{name} {fraction:.1%}" for name, fraction in zip(self.names, fractions, strict=True)][:MAX_LISTED]
        num_more = len(self.names) - len(listed)
        text = ", ".join(listed) + (f" and {num_more:,} more" if num_more else "")
        return {"kind of label": kind, f"{len(self.names):,} classes": text}

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @functools.cached_property
    def _ids_of_similar(self) -> dict[str, int]:
        return {_similar(name): index for index, name in enumerate(self.names)}

    def _encoded(self, value: Any, place: str) -> Any:
        if self.problem_type == "multi_label_classification":
            several = _label_list(value, self.reading, place)
            if self.reading.label_lists == "vectors":
                if not _is_vector(several) or len(several) != len(self.names):
                    rule = f"Each label must be {len(self.names)} numbers, 0 or 1, by --label-lists vectors"
                    raise InputError(f"{rule}; {place} has {short(value)}.")
                return [_BINARY[str(one)] for one in several]
            row = np.zeros(len(self.names), np.float32)
            row[[self._id(one, place) for one in several]] = 1
            return row
        if is_missing(value):
            raise InputError(f"Each row to train or evaluate on must have a label; {place} has none.")
        return _number(value, self.reading, place) if self.problem_type == "regression" else self._id(value, place)

    def _id(self, value: Any, place: str, seen: dict[str, int] | None = None) -> int:
        """Look up the id of a class; one that is in none gets the next id of `seen`, if that is given."""
        name = label_name(value, place)
        found = self._ids.get(name)
        if found is not None:
            return found
        if _similar(name) in self._ids_of_similar:
            found = self._ids_of_similar[_similar(name)]
            if self.reading.similar_labels == "merge":
                return found
            if self.reading.similar_labels is None:
                raise _SimilarLabelError(
                    f"A label must be written as in the training part; {place} has {name!r}, where training has "
                    f"{self.names[found]!r}. Correct it, or use --similar-labels merge to make them one class."
                )
        if seen is not None:
            return seen.setdefault(name, len(seen))
        known = _listed(self.names[:10]) + (" …" if len(self.names) > 10 else "")
        raise InputError(f"Each label must be one of the training part's: {known}; {place} has {name!r}.")


@dataclass(frozen=True)
class ScoredLabels:
    """Labels of rows to predict.

    encoded: as of `Labels.encode`; a class that training does not have has the next id, or column.
    is_labelled: bool (rows,), which have a label.
    unseen: the classes that training does not have.
    """

    encoded: NDArray[Any]
    is_labelled: NDArray[np.bool_]
    unseen: tuple[str, ...]


class _SimilarLabelError(InputError):
    """A label that differs from a class in white space or case alone."""


def find_labels(
    values: Sequence[Any], where: str, reading: LabelReading, known: Mapping[int, str] | None = None
) -> Labels:
    """Find what the labels to train on mean.

    Args:
        reading: of labels that have two readings.
        known: {id: name} of the model to start from; its order is kept if it has the same names.

    Raises:
        InputError: there are not two classes, or too many; labels that have two readings.
    """
    problem_type = reading.problem_type or _problem_type(values, where, reading)
    if problem_type == "regression":
        return Labels(problem_type, ("score",), reading)
    places = [f"row {row:,} of {where}" for row in range(1, len(values) + 1)]
    if problem_type == "multi_label_classification":
        lists = [_label_list(value, reading, place) for value, place in zip(values, places, strict=True)]
        if reading.label_lists == "vectors":
            size = max(map(len, lists), default=0)
            return Labels(problem_type, tuple(map(str, range(size))), reading)
        _refuse_vectors(lists, where, reading)
    else:
        lists = [[] if is_missing(value) else [value] for value in values]
    counts = Counter(label_name(one, place) for row, place in zip(lists, places, strict=True) for one in row)
    if len(counts) > MAX_CLASSES:
        raise InputError(
            f"Labels must be of at most {MAX_CLASSES} classes; those in {where} are of {len(counts):,}. Name their "
            "column by --label-column-name, or use --problem-type regression for numbers."
        )
    found = _without_similar(counts, where, reading)
    if (len(found) < 2 and problem_type == "single_label_classification") or not found:
        raise InputError(f"Labels must be of two classes at least; all in {where} are {_listed(found) or 'missing'}.")
    if known is not None and set(known.values()) == set(found):
        return Labels(problem_type, tuple(known[index] for index in sorted(known)), reading)
    return Labels(problem_type, tuple(sorted(found, key=_in_order)), reading)


def label_name(value: Any, place: str) -> str:
    """Name a class by its value in a table; 1.0 is 1, as where a column with gaps was read as numbers."""
    if not isinstance(value, str | numbers.Number | np.bool_) or is_missing(value):
        raise InputError(f"A label must be a text or a number; {place} has {short(value)}.")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_missing(value: Any) -> bool:
    """Return whether a table has nothing where a label should be."""
    return value is None or (isinstance(value, str) and not value.strip()) or (value != value) is True


def _problem_type(values: Sequence[Any], where: str, reading: LabelReading) -> ProblemType:
    """Decide what kind of label the values are, and refuse those that have two readings."""
    rows = [row for row, value in enumerate(values, start=1) if not is_missing(value)]
    values = [values[row - 1] for row in rows]
    num_lists = sum(_is_list(value) for value in values)
    if num_lists:
        if num_lists < len(values):
            raise InputError(
                f"Labels must all be lists, or none; of {where} {num_lists:,} of {len(values):,} are. Make them all of "
                "one kind, or use --problem-type multi_label_classification to divide texts by --label-separator."
            )
        return "multi_label_classification"
    parsed = [_as_number(value, reading) for value in values]
    found = [one for one in parsed if one is not None]
    if len(found) == len(values):
        is_whole = all(one.is_integer() for one in found)
        return "single_label_classification" if is_whole else "regression"
    names = {value for value in values if isinstance(value, str)}
    with_comma = next((name for name in sorted(names) if "," in name), None)
    if with_comma and all(_AS_WRITTEN.fullmatch(name.strip()) for name in names):
        raise InputError(
            f"Labels of {where} such as {with_comma!r} are numbers with a decimal comma, or several labels. Use "
            "--decimal-separator , for numbers; or --problem-type multi_label_classification, or "
            "single_label_classification for classes of these names."
        )
    as_fraction = next((name for name in sorted(names) if "." in name or "%" in name), None)
    if as_fraction and all(_AS_WRITTEN.fullmatch(name.strip()) for name in names):
        raise InputError(
            f"Labels of {where} such as {as_fraction!r} are written as people write numbers. Write them without "
            "thousands separators and percent signs, such as 1000.5; or use --problem-type "
            "single_label_classification for classes of these names."
        )
    _refuse_odd_values(dict(zip(rows, values, strict=True)), where, reading)
    _refuse_several_labels(names, where, reading)
    return "single_label_classification"


def _refuse_odd_values(values: Mapping[int, Any], where: str, reading: LabelReading) -> None:
    """Refuse {row: value} where nearly all are numbers, and the others stand for a missing one or are wrong."""
    parsed = {row: _as_number(value, reading) for row, value in values.items()}
    written = {row: str(value).strip() for row, value in values.items()}
    odd = [row for row, text in written.items() if parsed[row] is None and not _AS_WRITTEN.fullmatch(text)]
    are_missing = all(written[row].casefold() in MISSING_WORDS for row in odd)
    numbers_found = {number for number in parsed.values() if number is not None}
    has_fraction = any(not number.is_integer() for number in numbers_found)
    share = 1 - len(odd) / len(values)
    are_many = len(numbers_found) > MAX_LISTED and share >= 0.9
    if odd and share and (are_missing or are_many or (has_fraction and share >= 0.5)):
        more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
        raise InputError(
            f"Labels of {where} are numbers but for {short(values[odd[0]])} in row {odd[0]:,}{more}. Correct those "
            "rows or leave them out, or use --problem-type single_label_classification to make all labels classes."
        )


def _refuse_several_labels(names: set[str], where: str, reading: LabelReading) -> None:
    """Refuse texts that look like several labels each, so long as nobody has said that they are one."""
    others = "or --problem-type single_label_classification if each is the name of one class."
    as_list = next((name for name in sorted(names) if _is_written_list(name)), None)
    if as_list is not None:
        raise InputError(
            f"Labels of {where} such as {short(as_list)} are lists written as text. Write the table as .jsonl or "
            f".parquet, where a list is a list; {others}"
        )
    for separator in (reading.label_separator, *SEPARATORS):
        parts = {name: {part.strip() for part in name.split(separator)} - {""} for name in names if separator in name}
        counts = Counter(part for found in parts.values() for part in found)
        several = [
            name for name, found in sorted(parts.items()) if any(counts[one] > 1 or one in names for one in found)
        ]
        if several:
            flag = "" if separator == reading.label_separator else f" --label-separator '{separator}'"
            raise InputError(
                f"Labels of {where} such as {short(several[0])} may be several labels. Use --problem-type "
                f"multi_label_classification{flag} to divide them, {others}"
            )


def _refuse_vectors(lists: Sequence[Sequence[Any]], where: str, reading: LabelReading) -> None:
    sizes = {len(row) for row in lists}
    if reading.label_lists is None and len(sizes) == 1 and max(sizes) > 1 and all(map(_is_vector, lists)):
        raise InputError(
            f"Labels of {where} are lists of {max(sizes)} times 0 or 1, such as {short(lists[0])}. Use --label-lists "
            "vectors if each place stands for a class, or --label-lists names if the classes are called 0 and 1."
        )


def _without_similar(counts: Mapping[str, int], where: str, reading: LabelReading) -> dict[str, int]:
    """Refuse, merge or keep names that differ in white space, case or the form of a whole number alone."""
    if reading.similar_labels == "keep":
        return dict(counts)
    groups: dict[str, list[str]] = {}
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        groups.setdefault(_similar(name), []).append(name)
    several = next((names for names in groups.values() if len(names) > 1), None)
    if several is not None and reading.similar_labels is None:
        shown = " and ".join(f"{name!r} ({counts[name]:,} times)" for name in several[:2])
        raise InputError(
            f"Labels of {where} differ in white space, case, the encoding of accents or the form of a number alone: "
            f"{shown}. Use --similar-labels merge to make them one class, or --similar-labels keep to keep them apart."
        )
    return {names[0]: sum(counts[name] for name in names) for names in groups.values()}


def _similar(name: str) -> str:
    text = " ".join(unicodedata.normalize("NFC", name).split()).casefold()
    return str(int(text.partition(".")[0])) if _WHOLE.fullmatch(text) else text


def _label_list(value: Any, reading: LabelReading, place: str) -> Sequence[Any]:
    """List the labels of a row that may have several; an empty text, or list, has none."""
    if isinstance(value, str) and not _is_written_list(value):
        return [one.strip() for one in value.split(reading.label_separator) if one.strip()]
    if not _is_list(value):
        rule = "Each label must be a list, or a text that is divided by --label-separator"
        hint = " Write the table as .jsonl or .parquet, where a list is a list." if isinstance(value, str) else ""
        raise InputError(f"{rule}; {place} has {'none' if is_missing(value) else short(value)}.{hint}")
    return list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _is_written_list(value: str) -> bool:
    return value.strip().startswith("[") and value.strip().endswith("]")


def _is_vector(values: Sequence[Any]) -> bool:
    return bool(values) and all(str(one) in _BINARY for one in values)


def _as_number(value: Any, reading: LabelReading) -> float | None:
    """Read a number; of texts only those that are written as numbers in tables, so no `1_0` and no `Infinity`."""
    if isinstance(value, str):
        text = value.strip()
        if reading.decimal_separator == ",":
            text = text.replace(".", " ").replace(",", ".")  # a point would divide thousands
        return float(text) if _NUMBER.fullmatch(text) else None
    is_number = isinstance(value, numbers.Number) and not isinstance(value, bool | complex)
    return float(value) if is_number else None


def _number(value: Any, reading: LabelReading, place: str) -> float:
    number = _as_number(value, reading)
    if number is None or not math.isfinite(number) or abs(number) > MAX_FLOAT32:
        hint = " Use --decimal-separator , where a comma divides them." if "," in str(value) else ""
        raise InputError(f"Each label of a regression must be a number of 32 bits; {place} has {short(value)}.{hint}")
    return number


def short(value: Any) -> str:
    """Write a value of a table for an error, cut to some 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def _in_order(name: str) -> tuple[float, str]:
    """Sort whole numbers by their value, and before all else."""
    return (float(name), name) if _NUMBER.fullmatch(name) and float(name).is_integer() else (math.inf, name)
