"""A run of a task of one's own: its examples and model opened."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import CustomConfig, CustomData
from finetuning.data.examples import SPLITS, Examples, num_samples
from finetuning.data.rows import encode_texts
from finetuning.loop.model import open_start
from finetuning.loop.rows import Part, RowsJob
from finetuning.tasks.custom import CustomTask, load_task
from mlm_common.errors import InputError
from train.loop.run import Run
from train.runtime.machines import Cluster


class OwnJob(RowsJob[CustomConfig]):
    """The job of `run_task.py`."""

    def open_run(self, config: CustomConfig, cluster: Cluster) -> Run:
        """Load the task, let it read its examples, and encode them.

        Raises:
            InputError: whatever is wrong with file, class, examples, tokenizer or model.
        """
        task_class = load_task(str(config.data.task))
        start, data = open_start(config), config.data
        task = task_class(**start.of_rows)
        examples = read_examples(task, data)
        labels = read_labels(examples)
        task.see_labels(labels["train"], labels.get("validation"), data.metric_name)

        def part(split: str) -> Part:
            of_rows = labels.get(split)
            if of_rows is None:
                shape = (examples[split].num_rows, *labels["train"].shape[1:])
                of_rows = np.zeros(shape, labels["train"].dtype)
            rows = encode_texts(
                start.tokenizer,
                examples[split].texts,
                max_length=data.max_seq_length,
                token_types=start.token_types,
                labels=of_rows,
            )
            return Part(rows, labels.get(split))

        parts = {split: part(split) for split in examples}
        self.validation = {"": parts["validation"]} if "validation" in parts else {}
        self.tests = {"test": parts["test"]} if "test" in parts else {}
        eval_rows = parts["validation"].rows if "validation" in parts else None
        path, _, name = str(data.task).rpartition(":")
        # Of the file its content: where it lies may change.
        code = f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
        described = _describe(examples["train"], labels["train"]) | {"first label": task.shown(labels["train"][0])}
        rows, identities = parts["train"].rows, {"task": code}
        return start.run(task, rows, eval_rows, cluster, identities=identities, described=described)


def _describe(examples: Examples, labels: NDArray[np.generic]) -> dict[str, str]:
    """Describe the examples to train on in the plan."""
    kind = "fractions" if labels.dtype.kind == "f" else "whole numbers"
    each = f"{' x '.join(map(str, labels.shape[1:]))} a row" if labels.ndim > 1 else "one a row"
    values = np.asarray(labels, np.float64)
    return {
        "texts": f"{len(examples.texts)} of each row of {examples.name}",
        "labels": f"{kind}, {each}, {values.min():.6g} to {values.max():.6g}, mean {values.mean():.6g}",
    }


def read_examples(task: CustomTask, data: CustomData) -> dict[str, Examples]:
    """Let a task read its examples, {train, validation or test: examples}, cut to as many as asked.

    Raises:
        InputError: they are no examples, or there are none to train on, or to predict where that is asked for.
    """
    name, read = type(task).__name__, task.read(data)
    parts = {split: read[split] for split in SPLITS if split in read}
    if "train" not in parts:
        raise InputError(f"read of {name} must give examples under train; received {', '.join(read) or 'nothing'}.")
    if data.predicts and "test" not in parts:
        raise InputError(f"--do-predict needs a part to predict; read of {name} gives {', '.join(parts)}.")
    if not data.predicts:
        parts.pop("test", None)
    for split, one in parts.items():
        is_text = all(isinstance(text, str) for column in one.texts for text in column)
        sizes = {len(column) for column in one.texts} | ({len(one.labels)} if one.labels is not None else set())
        if not is_text or len(sizes) != 1 or 0 in sizes:
            raise InputError(
                f"read of {name} must give columns of text, and as many labels as there are rows; under {split} are "
                f"{' and '.join(f'{size:,}' for size in sorted(sizes))} of them."
            )
        if one.labels is None and split != "test":
            raise InputError(f"read of {name} must give labels to train and evaluate on; under {split} are none.")
    limits = num_samples(data)
    return {split: one.first(limits[split]) for split, one in parts.items()}


def read_labels(examples: Mapping[str, Examples]) -> dict[str, NDArray[np.generic]]:
    """Make the labels of each part that has some arrays, (rows, …): all int32, or float32 where one is a fraction.

    Raises:
        InputError: they are not numbers, not of one shape, or do not fit into 32 bits.
    """
    arrays = {}
    for split, one in examples.items():
        if one.labels is None:
            continue
        try:
            array = np.array(list(one.labels))
        except ValueError:
            array = np.array(None)
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise InputError(f"Labels of a task must be numbers, as many for each row; those of {one.name} are not.")
        arrays[split] = array
    for split, array in arrays.items():
        if array.shape[1:] != arrays["train"].shape[1:]:
            raise InputError(
                f"Labels must be of one form: of {examples['train'].name} each is {arrays['train'].shape[1:]}, of "
                f"{examples[split].name} {array.shape[1:]}."
            )
    has_fractions = any(array.dtype.kind == "f" for array in arrays.values())
    dtype = np.float32 if has_fractions else np.int32
    return {split: _cast(array, dtype, examples[split].name) for split, array in arrays.items()}


def _cast(array: NDArray[Any], dtype: Any, name: str) -> NDArray[np.generic]:
    """Cast labels; whole numbers must stay the same, fractions are rounded to the nearest number of that type."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
        as_before = cast.astype(array.dtype)
    is_fraction = array != np.round(array)
    is_kept = np.where(is_fraction, np.isclose(as_before, array, rtol=1e-6, atol=0), as_before == array)
    if not is_kept.all():
        first = tuple(np.argwhere(~is_kept)[0])
        raise InputError(
            f"Labels of a task must fit into 32 bits ({np.dtype(dtype)}); row {first[0] + 1:,} of {name} has "
            f"{array[first]}, which would become {cast[first]}. Use smaller numbers."
        )
    return cast
