"""The built-in corpus: technical English that every installation contains, so that a first run needs no data set.

The text consists of the docstrings of Python's standard library and of the installed packages. The docstrings are read
from the source files with `ast`, so no code of a package is run. The same Python with the same packages gives the same
documents in the same order. The documents are kept in the user's cache, because extracting them takes half a minute.
"""

import ast
import gc
import hashlib
import inspect
import logging
import multiprocessing
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import distributions
from itertools import accumulate
from pathlib import Path
from typing import Any

from mlm_common.cli.console import progress_bar
from mlm_common.corpus.identity import keep, recall
from mlm_common.workers import map_in_order, num_cores

logger = logging.getLogger(__name__)

MAX_BYTES = 25_000_000
MIN_DOCUMENT_CHARACTERS = 100
# If letters are less than this fraction of a paragraph's characters, not counting spaces, the paragraph is treated as a
# table, a formula or code.
MIN_LETTER_FRACTION = 0.75
# Paragraphs shorter than this may occur several times, because they are headings such as "Returns:".
MIN_UNIQUE_CHARACTERS = 60
SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "_vendor", "__pycache__", "site-packages", "dist-packages"})
FILES_AT_ONCE = 64
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CACHE_NAME = "built-in-corpus.json.gz"


@lru_cache(maxsize=1)
def read_builtin_corpus() -> tuple[str, ...]:
    """Return the documents in a fixed random order: at least 100 characters each, and at most 25 MB in total.

    The first call on a machine extracts the documents from all files, on all cores. Later calls find them in the user's
    cache, unless a file has changed.
    """
    files = list(python_files([sysconfig.get_path("stdlib"), *_package_folders()]))
    key = _key(files)
    documents = tuple(recall(CACHE_NAME, key) or ())
    if not documents:
        documents = read_files(files)
        keep(CACHE_NAME, key, documents)
    num_bytes = sum(len(text.encode()) for text in documents)
    logger.info("Built-in corpus: %s docstrings, %.1f MB.", f"{len(documents):,}", num_bytes / 1e6)
    return documents


def read_files(files: Sequence[str]) -> tuple[str, ...]:
    """Extract the documents from Python files, and show the progress."""
    unique = set(_without_repeated_paragraphs(_extract_all(files)))
    # Sorted by hash, so that the first documents are a fair sample of all packages.
    ordered = sorted(unique, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    ends_bytes = accumulate(len(text.encode()) for text in ordered)
    return tuple(text for text, end_bytes in zip(ordered, ends_bytes, strict=True) if end_bytes <= MAX_BYTES)


def _key(files: Sequence[str]) -> str:
    """Hash the facts that affect the documents: Python's version, this module, and each file's path, size and time."""
    digest = hashlib.sha256(platform.python_version().encode() + Path(__file__).read_bytes())
    for path in files:
        status = os.stat(path)  # noqa: PTH116 (faster for thousands of paths)
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def describe_builtin_corpus() -> dict[str, Any]:
    """Describe the origin of the text: Python's version, the number of packages, and a SHA-256 of their versions."""
    packages = sorted(f"{package.name}=={package.version}" for package in distributions(path=_package_folders()))
    return {
        "python": platform.python_version(),
        "num_packages": len(packages),
        "packages_sha256": hashlib.sha256("\n".join(packages).encode()).hexdigest(),
    }


def python_files(folders: Iterable[str]) -> Iterator[str]:
    """Yield the paths of the modules in each folder and its subfolders, except tests, in sorted order."""
    for folder in folders:
        for parent, subfolders, names in os.walk(folder):
            subfolders[:] = sorted(name for name in subfolders if name.isidentifier() and name not in SKIPPED_FOLDERS)
            for name in sorted(names):
                stem, ending = os.path.splitext(name)  # noqa: PTH122 (faster for thousands of names)
                if ending == ".py" and stem.isidentifier() and not stem.startswith("test_") and stem[-5:] != "_test":
                    yield f"{parent}/{name}"


def extract_documents(path: str) -> list[str]:
    """Extract the cleaned docstrings of a Python file, without examples and tables; none if it cannot be parsed."""
    source = Path(path).read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `ast` warns about invalid escapes in the strings of packages
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    documents = (_prose(inspect.cleandoc(docstring)) for docstring in _docstrings(tree))
    return [text for text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    # Visits statements only, because visiting every expression would take as long as parsing.
    to_visit: list[ast.AST] = [tree]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node, clean=False)):
            yield docstring
        for block in ("body", "orelse", "handlers", "finalbody"):
            statements = getattr(node, block, None)
            to_visit.extend(statements if isinstance(statements, list) else [])


def _prose(docstring: str) -> str:
    """Return the paragraphs of prose in a docstring, without examples, tables, formulas and code."""

    def is_prose(paragraph: str) -> bool:
        characters = "".join(paragraph.split())
        return ">>>" not in paragraph and sum(map(str.isalpha, characters)) >= MIN_LETTER_FRACTION * len(characters)

    text = docstring.encode("utf-8", "ignore").decode()  # drops unpaired surrogates, which no file can contain
    return "\n\n".join(filter(is_prose, text.split("\n\n"))).strip()


def _without_repeated_paragraphs(documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents after removing paragraphs that occurred before.

    Such paragraphs are frequent, because packages repeat the descriptions of common arguments.
    """
    seen: set[bytes] = set()
    for document in documents:
        new = []
        for paragraph in document.split("\n\n"):
            words = " ".join(paragraph.split())
            digest = hashlib.blake2b(words.encode(), digest_size=16).digest()
            if len(words) < MIN_UNIQUE_CHARACTERS or digest not in seen:
                new.append(paragraph)
            seen.add(digest)
        text = "\n\n".join(new).strip()
        if len(text) >= MIN_DOCUMENT_CHARACTERS:
            yield text


def _extract_all(files: Sequence[str]) -> Iterator[str]:
    groups = [files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE)]
    # A daemon process, such as a worker of multiprocessing.Pool, cannot start processes.
    num_workers = 1 if multiprocessing.current_process().daemon else num_cores()
    phase = f"Reading the docstrings of {len(files):,} Python files"
    with progress_bar(phase, " files", len(files)) as bar:
        results = map_in_order(_extract_group, groups, num_workers, "Free some memory.")
        for group, documents in zip(groups, results, strict=True):
            yield from documents
            bar.update(len(group))


def _extract_group(files: Sequence[str]) -> list[str]:
    was_enabled = gc.isenabled()
    gc.disable()  # syntax trees have no cycles, and looking for cycles takes a third of the time
    try:
        return [document for path in files for document in extract_documents(path)]
    finally:
        if was_enabled:
            gc.enable()


def _package_folders() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
