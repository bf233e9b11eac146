"""A data set that `datasets` reads: of the Hub at one commit, or a local folder, whose files are known by content."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.cli.local_paths import check_folder_or_hub
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.file_identity import with_checksums
from mlm_common.errors import InputError
from mlm_common.hub.retries import HubAwayError, hub_error, repeat
from mlm_common.storage.reading import StoredFile

if TYPE_CHECKING:
    from datasets import DatasetBuilder

COMMIT = re.compile(r"[0-9a-f]{40}")
RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0)


class Dataset:
    """An opened data set; `commit` is its state on the Hub, None for a local folder."""

    def __init__(self, config: CorpusConfig) -> None:
        """Find the data set, on the Hub at the commit that `dataset_revision` stands for now.

        Raises:
            InputError: there is none, or it cannot be fetched at that commit.
        """
        self._config = config
        self._name = str(config.dataset_name)
        check_folder_or_hub(self._name, "--dataset-name")
        self.is_local = Path(self._name).is_dir()
        self._builder = self._load_builder()

    def rows(self, split: str, flag: str) -> Any:
        """Open a split of it, a `datasets.Dataset` or `IterableDataset`.

        Raises:
            InputError: there is no such split, or it cannot be read; names `flag`.
        """
        try:
            if self._config.streaming:
                return self._builder.as_streaming_dataset(split=split)
            self._builder.download_and_prepare()
            return self._builder.as_dataset(split=split)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._cannot_be_loaded(error, f", {flag} {split}") from error

    def files(self, split: str) -> list[StoredFile]:
        """List the files of a split of a local folder, with their checksums; none of one on the Hub."""
        if not self.is_local:
            return []
        paths = [str(path) for path in (self._builder.config.data_files or {}).get(split, ())]
        found = [StoredFile(path, Path(path).stat().st_size) for path in paths if Path(path).is_file()]
        return with_checksums(found)

    def _load_builder(self) -> "DatasetBuilder":
        from datasets import load_dataset_builder
        from huggingface_hub import constants

        revision = self._config.dataset_revision
        try:
            self.commit = None if self.is_local or constants.HF_HUB_OFFLINE else _resolve(self._name, revision)
            builder = load_dataset_builder(self._name, self._config.dataset_config, revision=self.commit or revision)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._cannot_be_loaded(error) from error
        if not self.is_local:
            # Where the Hub does not answer, `datasets` takes whatever state of the data set is in its cache.
            wanted, self.commit = self.commit or revision, str(builder.hash)
            if not COMMIT.fullmatch(self.commit) or wanted not in (None, self.commit):
                raise InputError(
                    f"{self._name} must be read at --dataset-revision {wanted}; the Hub does not answer, and what was "
                    f"fetched before is {self.commit}. Name that, or give the command again where the Hub answers."
                )
        return builder

    def _cannot_be_loaded(self, error: Exception, more: str = "") -> InputError | HubAwayError:
        return hub_error(
            f"--dataset-name {self._name} (--dataset-config {self._config.dataset_config}, --dataset-revision "
            f"{self._config.dataset_revision}{more}) cannot be loaded: {' '.join(str(error).split())}",
            error,
        )


def _resolve(name: str, revision: str | None) -> str:
    """Ask the Hub for the commit that a branch or tag of a data set stands for."""
    from huggingface_hub import HfApi

    if revision and COMMIT.fullmatch(revision):
        return revision
    return str(repeat(lambda: HfApi().dataset_info(name, revision=revision, timeout=100), RETRY_DELAYS_SECONDS).sha)
