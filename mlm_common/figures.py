"""Pictures that go to files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def new_figure(**settings: Any) -> Iterator["Figure"]:
    """Give an empty figure of matplotlib with these settings; how it looks does not depend on the environment."""
    # A notebook names a backend of its own, which may be missing where its commands run; importing would fail.
    os.environ.pop("MPLBACKEND", None)
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("default"):
        yield Figure(layout="constrained", **settings)
