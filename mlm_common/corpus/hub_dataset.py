"""A data set that `datasets` reads: of the Hub, a local folder, or what `save_to_disk` wrote."""

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.identity import with_checksums
from mlm_common.corpus.text_files import has_known_ending
from mlm_common.corpus.text_formats import ROWS_PER_BATCH, BadRowHandler, arrow_texts, no_column
from mlm_common.errors import InputError, RunFailedError
from mlm_common.hub.retries import hub_error, repeat
from mlm_common.storage import check_folder_or_hub
from mlm_common.storage.guard import guarded_read
from mlm_common.storage.reading import StoredFile

if TYPE_CHECKING:
    from datasets import DatasetBuilder

COMMIT = re.compile(r"[0-9a-f]{40}")
RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0)
# What `save_to_disk` writes for several splits, and for one.
SPLITS_FILE, SAVED_FILES = "dataset_dict.json", ("state.json", "dataset_info.json")
CACHE_FILES = "cache-*.arrow"
# Builders of `datasets` for formats that this project reads itself, so that errors name the line.
FILE_BUILDERS = ("csv", "json", "parquet", "text")
# Settings of a builder that do not change what is in a file.
NAMES_OF_FILES = ("name", "version", "data_dir", "data_files", "description")
# Types of a column whose values are texts or missing.
TEXT_TYPES = ("string", "large_string", "string_view", "null")


class Dataset:
    """A data set that `datasets` reads; `commit` is its state on the Hub, None for a local folder."""

    def __init__(self, config: CorpusConfig) -> None:
        """Find the data set, on the Hub at the commit that `dataset_revision` names now."""
        check_folder_or_hub(str(config.dataset_name), "--dataset-name")
        self._config, self._name = config, str(config.dataset_name)
        self.is_local = Path(self._name).is_dir()
        self.commit: str | None = None
        self._saved = saved_splits(self._name, "--dataset-name") if self.is_local else None
        if self._saved is None:
            with self.explained():
                self._builder = self._find()

    def _find(self) -> "DatasetBuilder":
        from huggingface_hub import HfApi, constants

        revision = self._config.dataset_revision
        if revision and COMMIT.fullmatch(revision) and not self.is_local:
            self.commit = revision
        elif not self.is_local and not constants.HF_HUB_OFFLINE:
            look_up = functools.partial(HfApi().dataset_info, self._name, revision=revision, timeout=100)
            self.commit = str(repeat(look_up, RETRY_DELAYS_SECONDS).sha)
        builder = find_builder(self._name, self._config.dataset_config, self.commit or revision)
        if not self.is_local:
            # If the Hub does not answer, `datasets` takes whatever state of the data set is in its cache.
            wanted, self.commit = self.commit or revision, str(builder.hash)
            if not COMMIT.fullmatch(self.commit) or wanted not in (None, self.commit):
                raise InputError(
                    f"{self._name} must be read at --dataset-revision {wanted}; the Hub does not answer, and what was "
                    f"fetched before is {self.commit}. Pass that, or run the command again when the Hub answers."
                )
        return builder

    def rows(self, split: str, flag: str) -> Any:
        """Open a split, a `datasets.Dataset` or `IterableDataset`; an InputError names `flag`."""
        if self._saved is not None:
            self._check_split(split, flag, self._saved)
            return self._saved[split]
        with self.explained(f", {flag} {split}"):
            if self._config.streaming:
                return self._builder.as_streaming_dataset(split=split)
            self._builder.download_and_prepare()
            return self._builder.as_dataset(split=split)

    def files(self, split: str) -> list[StoredFile]:
        """List the files of a split of a local folder, with their checksums; none for the Hub."""
        if not self.is_local:
            return []
        if self._saved is not None:
            paths = [str(file["filename"]) for file in self._saved[split].cache_files]
        else:
            paths = [str(path) for path in (self._builder.config.data_files or {}).get(split, ())]
        found = [StoredFile(path, Path(path).stat().st_size) for path in paths if Path(path).is_file()]
        return with_checksums(found)

    def text_files(self, split: str, flag: str) -> list[StoredFile]:
        """List the files of a split of a local folder if `read_byte_range` can read them all; else none."""
        if not self.is_local or self._saved is not None:
            return []
        config = self._builder.config
        is_plain = type(self._builder).__module__.rpartition(".")[2] in FILE_BUILDERS and all(
            field.name in (*NAMES_OF_FILES, "on_mixed_types") or getattr(config, field.name) == _default(field)
            for field in dataclasses.fields(config)
        )
        if not is_plain or not config.data_files:
            return []
        self._check_split(split, flag, config.data_files)
        return self.files(split) if all(map(has_known_ending, config.data_files[split])) else []

    def _check_split(self, split: str, flag: str, splits: Iterable[str]) -> None:
        names = [str(name) for name in splits]
        if split not in names:
            raise InputError(f"{flag} must be a split of {self._name}: {', '.join(names)}; received {split!r}.")

    def explained(self, more: str = "") -> contextlib.AbstractContextManager[None]:
        """Turn any exception of `datasets` into one error that says what was read, and why it cannot be."""
        return loading_explained(
            f"--dataset-name {self._name} (--dataset-config {self._config.dataset_config}, --dataset-revision "
            f"{self._config.dataset_revision}{more}) cannot be loaded"
        )


@contextlib.contextmanager
def loading_explained(message: str) -> Iterator[None]:
    """Turn any exception of `datasets` into one error: the message, and what it has logged of the file or raised."""
    with _logged_errors() as logged:
        try:
            yield
        except (InputError, RunFailedError, MemoryError):
            raise
        except Exception as error:  # files that are missing or malformed show as nearly any exception
            reason = logged[-1] if logged else str(_root(error)) or type(error).__name__
            raise hub_error(f"{message}: {' '.join(reason.split())[:500]}", error) from error


def find_builder(name: str, config: str | None, revision: str | None) -> "DatasetBuilder":
    """Return what `datasets` reads a data set with; values of several types in a column of JSON are an error.

    Otherwise one value that is no text turns all texts of its part of a file into JSON, quoted and escaped.
    """
    from datasets import load_dataset_builder

    # Any value but "use_json" has this effect; `datasets` would leave out None.
    find_strictly = functools.partial(load_dataset_builder, name, config, revision=revision, on_mixed_types="refuse")
    try:
        builder = load_dataset_builder(name, config, revision=revision)
    except ValueError as error:
        # Without the Hub, `datasets` finds in its cache only what was fetched with the same settings.
        if "Couldn't find cache" not in str(error):
            raise
        return find_strictly()
    return find_strictly() if hasattr(builder.config, "on_mixed_types") else builder


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _root(error: BaseException) -> BaseException:
    """Return what an exception was raised from; `datasets` wraps it in one that says nothing."""
    return _root(error.__cause__) if error.__cause__ is not None else error


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the errors that `datasets` logs, which name the file, instead of printing them."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("datasets.packaged_modules")
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


def saved_splits(folder: str, flag: str) -> "dict[str, Any] | None":
    """Open a folder that `save_to_disk` wrote: {split: rows}, `train` for a single one; None for another folder.

    `datasets` would read such a folder with all `cache-*.arrow` files, in which it keeps rows that it computed.

    Raises:
        InputError: a file of it is damaged; or `datasets` could not find the files of the folder as they are.
    """
    top = Path(folder)
    if not top.is_dir():
        return None
    if (top / SPLITS_FILE).is_file():
        with guarded_read(top / SPLITS_FILE, "the list of splits that `save_to_disk` writes", flag=flag):
            names = list(json.loads((top / SPLITS_FILE).read_text("utf-8"))["splits"])
        return {name: _saved_rows(top / name, flag) for name in names}
    if all((top / name).is_file() for name in SAVED_FILES):
        return {"train": _saved_rows(top, flag)}
    if cached := next(iter(sorted(top.rglob(CACHE_FILES))), None):
        raise InputError(
            f"{flag} {folder} must have no files of a cache; {cached} is one, beside data that `save_to_disk` wrote. "
            f"Pass the folder that it wrote, with its {' and '.join(SAVED_FILES)}, or delete the cache."
        )
    if special := re.findall(r"[][*?]|::", str(top.resolve())):
        raise InputError(
            f"{flag} must be a path without [ ] * ? and ::, which `datasets` takes for patterns; {folder} has "
            f"{special[0]}. Rename the folder, or name its files instead."
        )
    return None


def _saved_rows(folder: Path, flag: str) -> Any:
    from datasets import load_from_disk

    with guarded_read(folder, "a folder that `save_to_disk` wrote", flag=flag):
        try:
            return load_from_disk(str(folder))
        except Exception:
            for path in sorted(folder.glob("data-*.arrow")):  # the exception does not name the file
                with guarded_read(path, "an Arrow file", flag=flag):
                    _read_through(path)
            raise


def _read_through(path: Path) -> None:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        for _ in pa.ipc.open_stream(file):
            pass


def dataset_texts(rows: Any, text_column: str, source: str, on_bad_row: BadRowHandler) -> Iterator[str]:
    """Yield the text of each row of a `datasets` data set, an empty one where the row has none.

    Raises:
        InputError: there is no such column, or it holds something else than text; names `source`.
    """
    feature = (rows.features or {}).get(text_column)
    if feature is not None and getattr(feature, "dtype", None) not in TEXT_TYPES:
        found = "values of several types (Json)" if type(feature).__name__ == "Json" else str(feature)
        raise InputError(f"--text-column must hold text; {text_column!r} of {source} has {found}.")

    def columns() -> Iterator[Any]:
        for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
            if text_column not in table.column_names:
                raise no_column(table.column_names, text_column, source)
            yield table[text_column]

    yield from arrow_texts(columns(), text_column, source, on_bad_row)
