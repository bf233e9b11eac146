"""Text files that the tests of a corpus and its identity share."""

from pathlib import Path

import pytest


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return the paths of a.txt, b.txt and c.txt, each with other text."""
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_text(f"text of {path.stem}\n" * 10, encoding="utf-8")
    return paths
