"""A data set that is read with `datasets`: from the Hub, a local folder, or a folder that `save_to_disk` wrote."""

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
# The file that `save_to_disk` writes for several splits, and the files that it writes for a single split.
SPLITS_FILE, SAVED_FILES = "dataset_dict.json", ("state.json", "dataset_info.json")
CACHE_FILES = "cache-*.arrow"
# Builders of `datasets` for formats that this project reads itself, so that errors can name the line.
FILE_BUILDERS = ("csv", "json", "parquet", "text")
# Settings of a builder that do not change how a file is read.
NAMES_OF_FILES = ("name", "version", "data_dir", "data_files", "description")
# Types of columns whose values are text or missing.
TEXT_TYPES = ("string", "large_string", "string_view", "null")


class Dataset:
    """A data set that is read with `datasets`.

    Attributes:
        is_local: whether it is a local folder.
        commit: its commit on the Hub; None for a local folder.
    """

    def __init__(self, config: CorpusConfig) -> None:
        """Find the data set. On the Hub, `dataset_revision` is resolved to its current commit."""
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
            # If the Hub does not answer, `datasets` uses whatever state of the data set is in its cache.
            requested, self.commit = self.commit or revision, str(builder.hash)
            if not COMMIT.fullmatch(self.commit) or requested not in (None, self.commit):
                raise InputError(
                    f"{self._name} at --dataset-revision {requested} is not in the cache, which has {self.commit}, and "
                    "the Hub does not answer. Pass the cached revision, or run the command again when the Hub answers."
                )
        return builder

    def rows(self, split: str, flag: str) -> Any:
        """Open a split as a `datasets.Dataset` or, with `streaming`, an `IterableDataset`.

        Raises:
            InputError: there is no such split, or it cannot be loaded; the message names `flag`.
        """
        if self._saved is not None:
            self._check_split(split, flag, self._saved)
            return self._saved[split]
        with self.explained(f", {flag} {split}"):
            if self._config.streaming:
                return self._builder.as_streaming_dataset(split=split)
            self._builder.download_and_prepare()
            return self._builder.as_dataset(split=split)

    def files(self, split: str) -> list[StoredFile]:
        """Return the files of a split of a local folder, with their checksums; none for a data set on the Hub."""
        if not self.is_local:
            return []
        if self._saved is not None:
            paths = [str(file["filename"]) for file in self._saved[split].cache_files]
        else:
            paths = [str(path) for path in (self._builder.config.data_files or {}).get(split, ())]
        files = [StoredFile(path, Path(path).stat().st_size) for path in paths if Path(path).is_file()]
        return with_checksums(files)

    def text_files(self, split: str, flag: str) -> list[StoredFile]:
        """Return the files of a split of a local folder if `read_byte_range` can read all of them; otherwise none."""
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

    def explained(self, more_flags: str = "") -> contextlib.AbstractContextManager[None]:
        """Turn any exception of `datasets` into an error that names the data set and the reason."""
        return loading_explained(
            f"--dataset-name {self._name} (--dataset-config {self._config.dataset_config}, --dataset-revision "
            f"{self._config.dataset_revision}{more_flags}) cannot be loaded"
        )


@contextlib.contextmanager
def loading_explained(message: str) -> Iterator[None]:
    """Turn any exception of `datasets` into an error: `message`, and the reason that `datasets` logged or raised."""
    with _logged_errors() as logged:
        try:
            yield
        except (InputError, RunFailedError, MemoryError):
            raise
        except Exception as error:  # missing or malformed files can raise nearly any exception
            reason = logged[-1] if logged else str(_root(error)) or type(error).__name__
            raise hub_error(f"{message}: {' '.join(reason.split())[:500]}", error) from error


def find_builder(name: str, config: str | None, revision: str | None) -> "DatasetBuilder":
    """Return the builder with which `datasets` reads a data set. Values of several types in a JSON column are an error.

    By default, a single value that is not text would turn all texts in its part of the file into quoted JSON.
    """
    from datasets import load_dataset_builder

    # Any value except "use_json" has this effect; None would not be passed on.
    find_strictly = functools.partial(load_dataset_builder, name, config, revision=revision, on_mixed_types="refuse")
    try:
        builder = load_dataset_builder(name, config, revision=revision)
    except ValueError as error:
        # When the Hub is unreachable, `datasets` finds only data in its cache that was fetched with the same settings.
        if "Couldn't find cache" not in str(error):
            raise
        return find_strictly()
    return find_strictly() if hasattr(builder.config, "on_mixed_types") else builder


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _root(error: BaseException) -> BaseException:
    """Return the first exception of a chain, because `datasets` wraps it in exceptions without information."""
    return _root(error.__cause__) if error.__cause__ is not None else error


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the errors that `datasets` logs, instead of printing them.

    Unlike the exceptions that `datasets` raises, the logged errors name the file.
    """
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
    """Open a folder that `save_to_disk` wrote.

    `load_dataset` cannot be used for such a folder: it would also read the `cache-*.arrow` files in it, in which
    `datasets` keeps computed rows.

    Returns:
        {split: rows}, where a single split is called `train`; None for any other folder.

    Raises:
        InputError: a file in the folder is damaged, or the folder is one that `datasets` would read wrongly.
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
            f"{flag} {folder} contains a cache file of `datasets`, {cached}, but is not a folder that `save_to_disk` "
            f"wrote. Pass that folder, with its {' and '.join(SAVED_FILES)}, or delete the cache files."
        )
    if special := re.findall(r"[][*?]|::", str(top.resolve())):
        raise InputError(
            f"{flag} must be a path without [ ] * ? and ::, which `datasets` treats as patterns; {folder} has "
            f"{special[0]}. Rename the folder, or name its files instead."
        )
    return None


def _saved_rows(folder: Path, flag: str) -> Any:
    import pyarrow as pa
    from datasets import load_from_disk

    with guarded_read(folder, "a folder that `save_to_disk` wrote", flag=flag):
        try:
            return load_from_disk(str(folder))
        except Exception:
            for path in sorted(folder.glob("data-*.arrow")):  # the exception does not name the file
                with guarded_read(path, "an Arrow file", flag=flag), pa.memory_map(str(path)) as file:
                    for _ in pa.ipc.open_stream(file):
                        pass
            raise


def dataset_texts(rows: Any, text_column: str, source: str, on_bad_row: BadRowHandler) -> Iterator[str | None]:
    """Yield the text of each row of a `datasets` data set; None if the row has none.

    Raises:
        InputError: there is no such column, or it contains values that are not text. The message names `source`.
    """
    feature = (rows.features or {}).get(text_column)
    if feature is not None and getattr(feature, "dtype", None) not in TEXT_TYPES:
        values = "values of several types (Json)" if type(feature).__name__ == "Json" else str(feature)
        raise InputError(f"--text-column must name a column of text; {text_column!r} of {source} has {values}.")

    def columns() -> Iterator[Any]:
        for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
            if text_column not in table.column_names:
                raise no_column(table.column_names, text_column, source)
            yield table[text_column]

    yield from arrow_texts(columns(), text_column, source, on_bad_row)
