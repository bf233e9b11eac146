"""Read the labels of a table: per row one class, several classes or a number. All tasks and formats use this reader.

`find_labels` decides the kind of labels from the training split. Ambiguous labels cause an error that names the flag
that resolves the ambiguity.
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
# A column with more distinct values is probably not a column of classes.
MAX_CLASSES = 1000
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Maximum number of classes that the printed plan lists.
MAX_LISTED = 12
# Texts that stand for a missing class.
NO_LABEL = ("-1", "?")
# Texts that stand for a missing number.
MISSING_WORDS = frozenset((
    "nan", "na", "n/a", "n.a.", "k.a.", "null", "none", "nil", "missing", "-", "--", "?", ".", "..", "inf", "+inf",
    "-inf", "infinity", "-infinity", "#n/a", "#na", "#nv", "#div/0!", "#value!", "#wert!", "#ref!", "#bezug!", "#name?",
    "#num!", "#zahl!", "#null!",
))  # fmt: skip
# Separators of labels, other than --label-separator, that tables often use.
SEPARATORS = (";", "|")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Numbers as spreadsheets display them: with thousands separators, with a decimal comma, or as percentages.
_AS_WRITTEN = re.compile(
    r"(?=.*\d)[+-]?(\d{1,3}([.,' \u00a0\u202f]\d{3})+|\d+)?([.,]\d+)?([eE][+-]?\d+)? ?%?", re.ASCII
)
_BINARY = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1}
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)(\.0*)?", re.ASCII)


@dataclass(frozen=True)
class LabelReading:
    """The flags that say how to read ambiguous labels. If a flag is None, the values of the labels decide."""

    problem_type: ProblemType | None = None
    label_separator: str = ","
    decimal_separator: Literal[".", ","] = "."
    label_lists: Literal["names", "vectors"] | None = None
    similar_labels: Literal["merge", "keep"] | None = None


@dataclass(frozen=True)
class Labels:
    """The labels that a model learns to predict.

    Attributes:
        problem_type: kind of problem, in transformers' terms.
        names: names of the classes, by id; a single name if the label is a number.
        reading: the flags with which the labels were read.
    """

    problem_type: ProblemType
    names: tuple[str, ...]
    reading: LabelReading = field(default_factory=LabelReading)

    @property
    def by_id(self) -> dict[int, str]:
        """{id: name of the class}."""
        return dict(enumerate(self.names))

    def encode(self, values: Sequence[Any], where: str) -> NDArray[Any]:
        """Convert labels to an array.

        Args:
            values: values of the column of labels.
            where: name of the table, used in error messages.

        Returns:
            For one class per row, class ids, int32 (rows,); for several classes per row, zeros and ones, float32 (rows,
            classes); for numbers, float32 (rows,).

        Raises:
            InputError: a label is missing or invalid, or is a class that the training split does not have.
        """
        encoded = self.zeros(len(values))
        for row, value in enumerate(values):
            encoded[row] = self._encoded(value, f"row {row + 1:,} of {where}")
        return encoded

    def encode_to_score(self, values: Sequence[Any], where: str) -> "ScoredLabels":
        """Convert labels of rows to predict to an array, as `encode` does, but allow missing labels and unseen classes.

        A label is missing if it is empty, or if it is `-1` or `?` and no class has that name. A class that the training
        split does not have gets an id above the ids of the training classes, so that every prediction for it is wrong.

        Raises:
            InputError: a label is invalid, or differs from a class only in white space or case.
        """
        is_labelled = np.array([not self._is_unlabelled(value) for value in values], bool)
        places = [f"row {row:,} of {where}" for row in range(1, len(values) + 1)]
        has_several = self.problem_type == "multi_label_classification"
        if self.problem_type == "regression" or self.reading.label_lists == "vectors":
            encoded = self.zeros(len(values))
            for row in np.flatnonzero(is_labelled).tolist():
                encoded[row] = self._encoded(values[row], places[row])
            return ScoredLabels(encoded, is_labelled, ())
        seen, ids = dict(self._ids), []
        for value, place, has_label in zip(values, places, is_labelled, strict=True):
            labels: Sequence[Any] = [value] if has_label else []
            if has_several and has_label:
                labels = _label_list(value, self.reading, place)
            ids.append([self._id(label, place, seen) for label in labels])
        if has_several:
            encoded = np.zeros((len(values), len(seen)), np.float32)
            for row_values, row_ids in zip(encoded, ids, strict=True):
                row_values[row_ids] = 1
        else:
            encoded = np.array([row_ids[0] if row_ids else 0 for row_ids in ids], np.int32)
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

    def zeros(self, num_rows: int) -> NDArray[Any]:
        """Return an array of zeros in the form that `encode` returns."""
        if self.problem_type == "multi_label_classification":
            return np.zeros((num_rows, len(self.names)), np.float32)
        return np.zeros(num_rows, np.int32 if self.problem_type == "single_label_classification" else np.float32)

    def describe(self, encoded: NDArray[Any]) -> dict[str, str]:
        """Describe encoded labels for the printed plan: their kind, and the fraction of rows with each class."""
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
        num_unlisted = len(self.names) - len(listed)
        text = ", ".join(listed) + (f" and {num_unlisted:,} more" if num_unlisted else "")
        return {"kind of label": kind, f"{len(self.names):,} classes": text}

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @functools.cached_property
    def _ids_of_similar(self) -> dict[str, int]:
        return {_similar(name): index for index, name in enumerate(self.names)}

    def _encoded(self, value: Any, place: str) -> Any:
        if self.problem_type == "multi_label_classification":
            labels = _label_list(value, self.reading, place)
            if self.reading.label_lists == "vectors":
                if not _is_vector(labels) or len(labels) != len(self.names):
                    rule = f"With --label-lists vectors, each label must be {len(self.names)} numbers, 0 or 1"
                    raise InputError(f"{rule}; {place} has {short(value)}.")
                return [_BINARY[str(label)] for label in labels]
            row = np.zeros(len(self.names), np.float32)
            row[[self._id(label, place) for label in labels]] = 1
            return row
        if is_missing(value):
            raise InputError(f"Each row to train or evaluate on must have a label; {place} has none.")
        return _number(value, self.reading, place) if self.problem_type == "regression" else self._id(value, place)

    def _id(self, value: Any, place: str, seen: dict[str, int] | None = None) -> int:
        """Return the id of a class.

        Args:
            value: value in the table.
            place: place of the value, used in error messages.
            seen: {name: id} of all classes so far. If it is given, an unknown class is added with the next id.
        """
        name = label_name(value, place)
        class_id = self._ids.get(name)
        if class_id is not None:
            return class_id
        if _similar(name) in self._ids_of_similar:
            class_id = self._ids_of_similar[_similar(name)]
            if self.reading.similar_labels == "merge":
                return class_id
            if self.reading.similar_labels is None:
                raise _SimilarLabelError(
                    f"A label must be written as in the training split; {place} has {name!r}, but the training split "
                    f"has {self.names[class_id]!r}. Correct it, or use --similar-labels merge to make them one class."
                )
        if seen is not None:
            return seen.setdefault(name, len(seen))
        class_names = _listed(self.names[:10]) + (" …" if len(self.names) > 10 else "")
        raise InputError(f"Label {name!r} in {place} does not occur in the training split, which has {class_names}.")


@dataclass(frozen=True)
class ScoredLabels:
    """Labels of rows to predict.

    Attributes:
        encoded: labels in the form that `Labels.encode` returns. Classes that the training split does not have get the
            next ids, or additional columns.
        is_labelled: bool (rows,), whether each row has a label.
        unseen: names of the classes that the training split does not have.
    """

    encoded: NDArray[Any]
    is_labelled: NDArray[np.bool_]
    unseen: tuple[str, ...]


class _SimilarLabelError(InputError):
    """A label that differs from a class only in white space or case."""


def find_labels(
    values: Sequence[Any], where: str, reading: LabelReading, model_labels: Mapping[int, str] | None = None
) -> Labels:
    """Decide the kind of labels in the training split, and collect the classes.

    Args:
        values: values of the column of labels.
        where: name of the table, used in error messages.
        reading: the flags that say how to read ambiguous labels.
        model_labels: {id: name} of the model to start from. If the model has the same names, its ids are kept.

    Raises:
        InputError: there are fewer than two classes or too many classes, or the labels are ambiguous.
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
    counts = Counter(label_name(label, place) for row, place in zip(lists, places, strict=True) for label in row)
    if len(counts) > MAX_CLASSES:
        raise InputError(
            f"Labels must have at most {MAX_CLASSES} classes; {where} has {len(counts):,} different labels. Name the "
            "column of the labels with --label-column-name, or use --problem-type regression for numbers."
        )
    names = _without_similar(counts, where, reading)
    if (len(names) < 2 and problem_type == "single_label_classification") or not names:
        raise InputError(f"Labels must have at least two classes; all in {where} are {_listed(names) or 'missing'}.")
    if model_labels is not None and set(model_labels.values()) == set(names):
        return Labels(problem_type, tuple(model_labels[index] for index in sorted(model_labels)), reading)
    return Labels(problem_type, tuple(sorted(names, key=_in_order)), reading)


def label_name(value: Any, place: str) -> str:
    """Return the name of a class, given its value in a table.

    A whole float such as 1.0 becomes "1", because a column of integers with gaps is often read as floats.
    """
    if not isinstance(value, str | numbers.Number | np.bool_) or is_missing(value):
        raise InputError(f"A label must be text or a number; {place} has {short(value)}.")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_missing(value: Any) -> bool:
    """Return whether a value of a table means that there is no label."""
    return value is None or (isinstance(value, str) and not value.strip()) or (value != value) is True


def _problem_type(values: Sequence[Any], where: str, reading: LabelReading) -> ProblemType:
    """Decide the kind of labels from their values; raise InputError if the values are ambiguous."""
    rows = [row for row, value in enumerate(values, start=1) if not is_missing(value)]
    values = [values[row - 1] for row in rows]
    num_lists = sum(_is_list(value) for value in values)
    if num_lists:
        if num_lists < len(values):
            raise InputError(
                f"Either all labels must be lists, or none; in {where} {num_lists:,} of {len(values):,} are. Make them "
                "all lists, or use --problem-type multi_label_classification to split the others by --label-separator."
            )
        return "multi_label_classification"
    parsed = [_as_number(value, reading) for value in values]
    numbers_found = [number for number in parsed if number is not None]
    if len(numbers_found) == len(values):
        is_whole = all(number.is_integer() for number in numbers_found)
        return "single_label_classification" if is_whole else "regression"
    names = {value for value in values if isinstance(value, str)}
    with_comma = next((name for name in sorted(names) if "," in name), None)
    if with_comma and all(_AS_WRITTEN.fullmatch(name.strip()) for name in names):
        raise InputError(
            f"Labels of {where} such as {with_comma!r} may be numbers with a decimal comma, or several labels. Use "
            "--decimal-separator ',' for numbers, --problem-type multi_label_classification for several labels, or "
            "--problem-type single_label_classification for classes with these names."
        )
    as_fraction = next((name for name in sorted(names) if "." in name or "%" in name), None)
    if as_fraction and all(_AS_WRITTEN.fullmatch(name.strip()) for name in names):
        raise InputError(
            f"Labels of {where} such as {as_fraction!r} look like formatted numbers. Write them without thousands "
            "separators and percent signs, such as 1000.5, or use --problem-type single_label_classification for "
            "classes with these names."
        )
    _refuse_odd_values(dict(zip(rows, values, strict=True)), where, reading)
    _refuse_several_labels(names, where, reading)
    return "single_label_classification"


def _refuse_odd_values(values: Mapping[int, Any], where: str, reading: LabelReading) -> None:
    """Raise InputError if nearly all values {row: value} are numbers, and the other values are missing or wrong."""
    parsed = {row: _as_number(value, reading) for row, value in values.items()}
    written = {row: str(value).strip() for row, value in values.items()}
    odd = [row for row, text in written.items() if parsed[row] is None and not _AS_WRITTEN.fullmatch(text)]
    are_missing = all(written[row].casefold() in MISSING_WORDS for row in odd)
    numbers_found = {number for number in parsed.values() if number is not None}
    has_fraction = any(not number.is_integer() for number in numbers_found)
    fraction = 1 - len(odd) / len(values)  # fraction of numbers
    are_many = len(numbers_found) > MAX_LISTED and fraction >= 0.9
    if odd and fraction and (are_missing or are_many or (has_fraction and fraction >= 0.5)):
        others = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
        raise InputError(
            f"Labels of {where} are numbers, except for {short(values[odd[0]])} in row {odd[0]:,}{others}. Correct "
            "these rows or leave them out, or use --problem-type single_label_classification to make all labels "
            "classes."
        )


def _refuse_several_labels(names: set[str], where: str, reading: LabelReading) -> None:
    """Raise InputError if some labels look like several labels in one text."""
    otherwise = "or --problem-type single_label_classification if each is the name of one class."
    as_list = next((name for name in sorted(names) if _is_written_list(name)), None)
    if as_list is not None:
        raise InputError(
            f"Labels of {where} such as {short(as_list)} are lists written as text. Save the table as .jsonl or "
            f".parquet, which have real lists, {otherwise}"
        )
    for separator in (reading.label_separator, *SEPARATORS):
        parts = {name: {part.strip() for part in name.split(separator)} - {""} for name in names if separator in name}
        counts = Counter(part for parts_of_name in parts.values() for part in parts_of_name)
        joined = [
            name
            for name, parts_of_name in sorted(parts.items())
            if any(counts[part] > 1 or part in names for part in parts_of_name)
        ]
        if joined:
            flag = "" if separator == reading.label_separator else f" --label-separator '{separator}'"
            raise InputError(
                f"Labels of {where} such as {short(joined[0])} may each contain several labels. Use "
                f"--problem-type multi_label_classification{flag} to split them, {otherwise}"
            )


def _refuse_vectors(lists: Sequence[Sequence[Any]], where: str, reading: LabelReading) -> None:
    sizes = {len(row) for row in lists}
    if reading.label_lists is None and len(sizes) == 1 and max(sizes) > 1 and all(map(_is_vector, lists)):
        raise InputError(
            f"Labels of {where} are lists of {max(sizes)} zeros and ones, such as {short(lists[0])}. Use --label-lists "
            "vectors if each position stands for a class, or --label-lists names if the classes are called 0 and 1."
        )


def _without_similar(counts: Mapping[str, int], where: str, reading: LabelReading) -> dict[str, int]:
    """Merge, keep or reject names that differ only in white space, case or the form of a whole number."""
    if reading.similar_labels == "keep":
        return dict(counts)
    groups: dict[str, list[str]] = {}
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        groups.setdefault(_similar(name), []).append(name)
    similar = next((names for names in groups.values() if len(names) > 1), None)
    if similar is not None and reading.similar_labels is None:
        examples = " and ".join(f"{name!r} ({counts[name]:,} times)" for name in similar[:2])
        raise InputError(
            f"Some labels of {where} differ only in white space, case, the encoding of accents or the form of a "
            f"number: {examples}. Use --similar-labels merge to make them one class, or --similar-labels keep to keep "
            "them apart."
        )
    return {names[0]: sum(counts[name] for name in names) for names in groups.values()}


def _similar(name: str) -> str:
    text = " ".join(unicodedata.normalize("NFC", name).split()).casefold()
    return str(int(text.partition(".")[0])) if _WHOLE.fullmatch(text) else text


def _label_list(value: Any, reading: LabelReading, place: str) -> Sequence[Any]:
    """Return the labels of a row that may have several labels; an empty string or list means no label."""
    if isinstance(value, str) and not _is_written_list(value):
        return [label.strip() for label in value.split(reading.label_separator) if label.strip()]
    if not _is_list(value):
        rule = "Each label must be a list, or a string of labels separated by --label-separator"
        hint = " Save the table as .jsonl or .parquet, which have real lists." if isinstance(value, str) else ""
        raise InputError(f"{rule}; {place} has {'none' if is_missing(value) else short(value)}.{hint}")
    return list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _is_written_list(value: str) -> bool:
    return value.strip().startswith("[") and value.strip().endswith("]")


def _is_vector(values: Sequence[Any]) -> bool:
    return bool(values) and all(str(value) in _BINARY for value in values)


def _as_number(value: Any, reading: LabelReading) -> float | None:
    """Convert a value to a number, or return None. Texts such as `1_0` and `Infinity` are not numbers."""
    if isinstance(value, str):
        text = value.strip()
        if reading.decimal_separator == ",":
            text = text.replace(".", " ").replace(",", ".")  # a point would be a thousands separator, which is rejected
        return float(text) if _NUMBER.fullmatch(text) else None
    is_number = isinstance(value, numbers.Number) and not isinstance(value, bool | complex)
    return float(value) if is_number else None


def _number(value: Any, reading: LabelReading, place: str) -> float:
    number = _as_number(value, reading)
    if number is None or not math.isfinite(number) or abs(number) > MAX_FLOAT32:
        hint = " Use --decimal-separator ',' if it has a decimal comma." if "," in str(value) else ""
        raise InputError(f"Each label of a regression must be a 32-bit number; {place} has {short(value)}.{hint}")
    return number


def short(value: Any) -> str:
    """Format a value of a table for an error message, cut to about 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def _in_order(name: str) -> tuple[float, str]:
    """Return the sort key of a class: whole numbers come first, sorted by value."""
    return (float(name), name) if _NUMBER.fullmatch(name) and float(name).is_integer() else (math.inf, name)
