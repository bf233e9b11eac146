import sysconfig
from pathlib import Path

import pytest

from mlm_common.corpus import builtin
from mlm_common.corpus.builtin import extract_documents, python_files, read_files

PROSE = "Return the words of the sentence in the order in which they were read, and nothing else besides them, {}."
ESCAPE = PROSE.format(r"inner function \d")
SURROGATE = PROSE.format(r"lone \ud800 surrogate")
MODULE = f'''
"""{PROSE.format("module")}

>>> this_example("is left out of the corpus because it is not a text that anybody would want to read")

| a | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |

Raises nothing.
"""
raise SystemExit("a module that is only read must not run")

text = """{PROSE.format("an ordinary string")}"""

@decorated
class Sentence:
    """{PROSE.format("class")}"""

    if True:
        try:
            async def words(self):
                """{PROSE.format("method")}
                    indented.
                """
        except ValueError:
            def words(self):
                """Too short."""

def outer():
    def inner():
        r"""{ESCAPE}"""

def surrogate():
    """{SURROGATE}"""
'''


def write_package(folder: Path, files: dict[str, str]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return str(folder)


def documented(*docstrings: str) -> str:
    return "\n".join(f'def function_{index}():\n    """{text}"""\n' for index, text in enumerate(docstrings))


def test_docstrings_of_a_module(tmp_path):
    (tmp_path / "module.py").write_text(MODULE, encoding="utf-8")
    assert sorted(extract_documents(str(tmp_path / "module.py"))) == sorted(
        [
            PROSE.format("module") + "\n\nRaises nothing.",
            PROSE.format("class"),
            PROSE.format("method") + "\nindented.",
            ESCAPE,
            PROSE.format("lone  surrogate"),
        ]
    )


@pytest.mark.parametrize("source", [b'"""unclosed', b'def broken(:\n """doc"""', b'"""nul \0"""', b"# no docstring"])
def test_file_that_cannot_be_parsed_has_no_documents(source, tmp_path):
    (tmp_path / "module.py").write_bytes(source)
    assert extract_documents(str(tmp_path / "module.py")) == []


def test_only_importable_modules_are_read(tmp_path):
    names = ["b.py", "a/z.py", "a/y.py", "a/tests/t.py", "a/test_y.py", "a/y_test.py", "x-1.0.dist-info/i.py"]
    names += ["a/site-packages/s.py", "a/not-a-module.py", "a/data.txt"]
    folder = write_package(tmp_path, dict.fromkeys(names, ""))
    assert [str(Path(path).relative_to(tmp_path)) for path in python_files([folder])] == ["b.py", "a/y.py", "a/z.py"]


def test_repeated_documents_and_paragraphs_occur_once(tmp_path, monkeypatch):
    argument = "value: " + PROSE.format("argument")
    first = documented(PROSE.format("first") + "\n\n" + argument, PROSE.format("same"))
    second = documented(PROSE.format("second") + "\n\n" + argument, PROSE.format("same"))
    files = list(python_files([write_package(tmp_path, {"a.py": first, "b.py": second})]))
    documents = read_files(files)
    assert len(documents) == 3
    assert sum(argument in text for text in documents) == 1
    assert sum(PROSE.format("same") in text for text in documents) == 1
    monkeypatch.setattr(builtin, "MAX_BYTES", len(documents[0]) + 1)
    assert read_files(files) == documents[:1]


def test_the_corpus_is_extracted_once_and_again_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = tmp_path / "packages" / "module.py"
    module.parent.mkdir()
    module.write_text(f'"""{PROSE.format("first")}"""\n', encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(module.parent))
    monkeypatch.setattr(builtin, "num_cores", lambda: 1)
    extracted = []
    extract = builtin.extract_documents
    monkeypatch.setattr(builtin, "extract_documents", lambda path: extracted.append(path) or extract(path))

    def read() -> tuple[str, ...]:
        builtin.read_builtin_corpus.cache_clear()
        return builtin.read_builtin_corpus()

    try:
        first = read()
        num_files = len(extracted)
        assert first == (PROSE.format("first"),)
        assert read() == first
        assert len(extracted) == num_files
        module.write_text(f'"""{PROSE.format("second, of another length")}"""\n', encoding="utf-8")
        assert read() == (PROSE.format("second, of another length"),)
        assert len(extracted) == 2 * num_files
    finally:
        builtin.read_builtin_corpus.cache_clear()
