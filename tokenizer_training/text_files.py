"""Local text files: which ones a pattern names, and the texts in each, streamed through `datasets`."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizer_training.command_line import InputError

FORMAT_OF_ENDING = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ROWS_PER_BATCH = 256


def find_files(patterns: list[str], flag: str) -> dict[str, int]:
    """Return name -> size in bytes of the files that the patterns name, in the patterns' order, each glob's sorted.

    Raises:
        InputError: a pattern without a match, or a file whose ending is not one that can be read; names `flag`.
    """
    files: dict[str, int] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        names = [name for name in names if Path(name).is_file()]
        if not names:
            raise InputError(f"{flag} must name local files; no file matches {pattern!r}.")
        for name in names:
            _format_of(name, flag)
            files[name] = Path(name).stat().st_size
    return files


def read_file(name: str, text_column: str, sample_by: str) -> Iterator[str]:
    """Yield the texts of one file, in the file's order.

    Raises:
        InputError: the file is not what its ending says, is not UTF-8, or lacks the text column.
    """
    from datasets import load_dataset

    file_format = _format_of(name, "--data-files")
    options: dict[str, Any] = {}
    if file_format == "text":
        options, text_column = {"sample_by": sample_by}, "text"
    elif file_format == "csv":
        # Without a converter, "007" becomes 7 and "NA" becomes no text at all.
        options = {"converters": {text_column: str}, "na_filter": False}
    try:
        # A streamed file is not copied to a cache; the name is escaped because `datasets` takes it for a glob.
        rows = load_dataset(file_format, data_files=[glob.escape(name)], split="train", streaming=True, **options)
        yield from rows_to_texts(rows, text_column, name)
    except StopIteration:  # what `datasets` raises for a JSON file without a row
        return
    except InputError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{name} cannot be read as UTF-8 {file_format}: {' '.join(str(error).split())}") from error


def rows_to_texts(rows: Any, text_column: str, source: str) -> Iterator[str]:
    """Yield the text of each row of a `datasets` data set, an empty one where the row has none.

    Raises:
        InputError: there is no such column, or it holds something else than text; names `source`.
    """
    for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
        if text_column not in table.column_names:
            raise InputError(
                f"--text-column must name a column; {source} has {', '.join(table.column_names)}, not {text_column!r}."
            )
        for text in table[text_column].to_pylist():
            if not isinstance(text, str | None):
                raise InputError(
                    f"--text-column must hold text; {text_column!r} of {source} has {type(text).__name__} {text!r:.50}."
                )
            yield text or ""


def _format_of(name: str, flag: str) -> str:
    path = Path(name.removesuffix(".gz"))
    file_format = FORMAT_OF_ENDING.get(path.suffix)
    if file_format is None or name.endswith(".parquet.gz"):
        raise InputError(
            f"{flag} takes files ending in {', '.join(FORMAT_OF_ENDING)} (also .gz, but for .parquet); got {name!r}."
        )
    return file_format
