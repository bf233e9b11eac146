"""The speedrun's text: docstrings of pinned packages from PyPI, in three splits of whole packages.

The packages are downloaded by pip, never installed, and none of their code is run. The SHA-256 of their archives and of
the text of each split is checked, so everybody trains and scores on the same bytes.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mlm_common.corpus.builtin import python_files, read_files
from mlm_common.errors import InputError
from mlm_common.storage.guard import guarded_read

TRAIN, VALIDATION, SCORED = SPLITS = ("train", "validation", "scored")
# Pure Python wheels, which are the same for every platform: {split: {file: SHA-256}}.
PACKAGES = {
    TRAIN: {
        "bokeh-3.7.3-py3-none-any.whl": "b0e79dd737f088865212e4fdcb0f3b95d087f0f088bf8ca186a300ab1641e2c7",
        "celery-5.5.3-py3-none-any.whl": "0b5761a07057acee94694464ca482416b959568904c9dfa41ce8413a7d65d525",
        "dask-2025.5.1-py3-none-any.whl": "3b85fdaa5f6f989dde49da6008415b1ae996985ebdfb1e40de2c997d9010371d",
        "diffusers-0.33.1-py3-none-any.whl": "027469e74f289338eb24127409f8d60d840b1b7ce4b27ffcd3134fd3b8431567",
        "django-5.2.1-py3-none-any.whl": "a9b680e84f9a0e71da83e399f1e922e1ab37b2173ced046b541c72e1589a5961",
        "flax-0.10.6-py3-none-any.whl": "86a5f0ba0f1603c687714999b58a4e362e784a6d2dc5a510b18a8e7a6c729e18",
        "jax-0.6.2-py3-none-any.whl": "bb24a82dc60ccf704dcaf6dbd07d04957f68a6c686db19630dd75260d1fb788c",
        "keras-3.10.0-py3-none-any.whl": "c095a6bf90cd50defadf73d4859ff794fad76b775357ef7bd1dbf96388dae7d3",
        "lightning-2.5.1-py3-none-any.whl": "512cbf9e80859f331b329536b2e2f90776e6f8a399048745bb4dabacc36e2850",
        "mne-1.9.0-py3-none-any.whl": "c26da9ac59bce963c5b25a3be9f5f61dd128f980cdc178a6fceef27743734306",
        "nilearn-0.11.1-py3-none-any.whl": "8446fc815034affe56dcf3c6e74caf6749b421a859347adc302c331138ea37e9",
        "pymc-5.23.0-py3-none-any.whl": "4c157d76cbdac88fff629652a8aac527f66ca568db706a4008ba35fe4c88d79c",
        "setuptools-80.9.0-py3-none-any.whl": "062d34222ad13e0cc312a4c02d73f059e86a4acbfbdea8f8f76b28c99f306922",
        "sphinx-8.1.3-py3-none-any.whl": "09719015511837b76bf6e03e42eb7595ac8c2e41eeb9c29c5b755c6b677992a2",
        "sympy-1.14.0-py3-none-any.whl": "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "twisted-24.11.0-py3-none-any.whl": "fe403076c71f04d5d2d789a755b687c5637ec3bcd3b2b8252d76f2ba65f54261",
        "xarray-2025.6.1-py3-none-any.whl": "8b988b47f67a383bdc3b04c5db475cd165e580134c1f1943d52aee4a9c97651b",
    },
    VALIDATION: {
        "librosa-0.11.0-py3-none-any.whl": "0b6415c4fd68bff4c29288abe67c6d80b587e0e1e2cfb0aad23e4559504a7fa1",
        "optax-0.2.4-py3-none-any.whl": "db35c04e50b52596662efb002334de08c2a0a74971e4da33f467e84fac08886a",
        "seaborn-0.13.2-py3-none-any.whl": "636f8336facf092165e27924f223d3c62ca560b1f2bb5dff7ab7fad265361987",
    },
    SCORED: {
        "networkx-3.4.2-py3-none-any.whl": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
        "nltk-3.9.1-py3-none-any.whl": "4fa26829c5b00715afe3061398a8989dc643b92ce7dd93fb4585a70930d168a1",
    },
}
# SHA-256 of the files that `write_text` writes.
TEXT_SHA256 = {
    TRAIN: "f835c1f1d522b55027acbc4553da953a47932f4238f29303ea0cb0ca6290384a",
    VALIDATION: "49ebe7be4e03d4122b0b785785f771319073bfd94020e27a35a4405c876fdc69",
    SCORED: "61e1142df5c724be0adbfaba167a96c2a475e206817bd0edd216974d8078160d",
}
# Held-out documents share at most this many consecutive words with the training text. GPT-3's authors used the same
# rule.
MAX_SHARED_WORDS = 12


def check_sha256(path: Path, expected: str, hint: str) -> None:
    """Raise InputError unless the file exists and has this SHA-256."""
    with guarded_read(path, "a file", hint=hint):
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    if checksum != expected:
        raise InputError(f"{path} must have the SHA-256 {expected}; it has {checksum}. {hint}")


def download(folder: Path, packages: Mapping[str, str]) -> None:
    """Download the missing wheels into a folder with pip, and check all wheels."""
    missing = [name for name in packages if not (folder / name).exists()]
    if missing:
        wanted = ["==".join(name.split("-")[:2]) for name in missing]
        # Always for the same version of Python, so that everybody gets the same files.
        options = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *wanted]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise InputError(
                f"pip could not download {', '.join(wanted)}: {last}. Check the connection, and try again."
            )
    for name, expected in packages.items():
        check_sha256(folder / name, expected, "Delete it, and run the command again.")


def read_wheels(wheels: Iterable[Path]) -> tuple[str, ...]:
    """Extract the docstrings of wheels: documents without repeated paragraphs, ordered by their hash."""
    with tempfile.TemporaryDirectory(prefix="speedrun-") as folder:
        for wheel in wheels:
            with guarded_read(wheel, "a wheel"), zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(Path(folder, wheel.name.split("-")[0]), names)
        # Subfolders whose names are not identifiers contain no modules.
        return read_files(list(python_files(sorted(str(path) for path in Path(folder).iterdir()))))


def runs_of_words(document: str) -> Iterator[tuple[str, ...]]:
    """Yield the runs of `MAX_SHARED_WORDS` + 1 words of a document, in lower case."""
    words = document.lower().split()
    return zip(*(words[start:] for start in range(MAX_SHARED_WORDS + 1)), strict=False)


def without_shared(documents: Iterable[str], others: Iterable[str]) -> list[str]:
    """Drop the documents that share more than `MAX_SHARED_WORDS` consecutive words with a document of `others`."""
    documents = list(documents)
    runs = {run for document in documents for run in runs_of_words(document)}
    shared = {run for other in others for run in runs_of_words(other) if run in runs}
    return [document for document in documents if shared.isdisjoint(runs_of_words(document))]


def write_text(wheels: Path, folder: Path) -> None:
    """Extract the text of each split from a folder of wheels; write it to SPLIT.jsonl as lines {"text": …}."""
    documents = {split: read_wheels(wheels / name for name in PACKAGES[split]) for split in SPLITS}
    for split, texts in documents.items():
        kept = texts if split == TRAIN else without_shared(texts, documents[TRAIN])
        lines = (json.dumps({"text": text}) + "\n" for text in kept)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def check_text(folder: Path) -> None:
    """Raise InputError unless the text of each split is the same as when the first record was set."""
    for split, expected in TEXT_SHA256.items():
        check_sha256(folder / f"{split}.jsonl", expected, "Delete the folder of data, and prepare it again.")
