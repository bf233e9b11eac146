"""Draw plots in a common style and return them as image files."""

import io
import os
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Twice the usual resolution, so that plots are sharp on current screens.
DOTS_PER_INCH = 200
# Colors that color-blind readers can tell apart (Okabe and Ito 2008). The yellow is darker, so that text is legible.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7b3f9e", "#4d4d4d")
MUTED = "#6b7280"
FAINT_ALPHA = 0.35
TITLE_POINTS, TEXT_POINTS, NOTE_POINTS = 12, 9, 8
# Average width of a character of bold text, relative to the font size.
CHARACTER_WIDTH = 0.62
LABEL_OFFSET_POINTS = 6
# Height of a line of text, relative to the font size.
LINE_HEIGHT = 1.25


class EndLabel(NamedTuple):
    """The label of a line, placed at the line's last point (x, y)."""

    x: float
    y: float
    text: str
    color: str


@contextmanager
def new_figure(**settings: Any) -> Iterator["Figure"]:
    """Yield an empty matplotlib figure with these settings. Its appearance does not depend on the environment."""
    # A notebook sets a backend that may be missing in the environment of its commands; the import would then fail.
    os.environ.pop("MPLBACKEND", None)
    from matplotlib import style
    from matplotlib.figure import Figure

    # Characters that no font has appear as boxes, and matplotlib warns about each. The filter is never removed, because
    # plots are also drawn in threads, where `catch_warnings` is not safe.
    warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
    # Without a salt the ids in SVG files are random.
    with style.context(["default", {"svg.hashsalt": "plot", "font.size": TEXT_POINTS}]):
        yield Figure(layout="constrained", **settings)


def image_of(figure: "Figure", file_format: str = "png") -> bytes:
    """Return a figure as the bytes of a `png` or `svg` file. The same figure gives the same bytes."""
    image = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else None
    figure.savefig(image, format=file_format, dpi=DOTS_PER_INCH, metadata=metadata)
    return image.getvalue()


def set_titles(figure: "Figure", title: str, subtitle: str = "", note: str = "") -> None:
    """Write a bold title and a subtitle above the figure and a note below it, wrapped to the figure's width."""
    from matplotlib.text import Annotation

    points = figure.get_figwidth() * 72
    title, subtitle, note = (
        "\n".join(textwrap.wrap(text, max(20, int(points / size / CHARACTER_WIDTH))))
        for text, size in ((title, TITLE_POINTS), (subtitle, TEXT_POINTS), (note, NOTE_POINTS))
    )
    # Empty lines after the title leave room for the subtitle, which has a different font size.
    room = "\n" * (subtitle.count("\n") + 1) if subtitle else ""
    place: dict[str, Any] = {"x": 0.01, "ha": "left"}
    above = figure.suptitle(f"{title}{room}", size=TITLE_POINTS, weight="bold", **place)
    below = Annotation(subtitle, (0, 0), xycoords=above, va="bottom", size=TEXT_POINTS, color=MUTED)
    below.set_in_layout(False)
    figure.add_artist(below)
    figure.supxlabel(note, size=NOTE_POINTS, color=MUTED, **place)


def without_box(axes: "Axes") -> None:
    """Remove the box around the axes except its bottom line, and draw faint horizontal lines behind the data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0)
    axes.tick_params(axis="x", length=3)
    axes.grid(axis="y", alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(MUTED)


def label_ends(axes: "Axes", labels: Sequence[EndLabel], *, in_column: bool = False) -> None:
    """Write each label at the end of its line, moved up or down so that labels do not overlap.

    Call this after everything else is drawn and the limits of the axes are set.

    Args:
        axes: where to write.
        labels: the labels.
        in_column: put all labels to the right of the axes, connected to their lines by faint lines, so that they cover
            no data.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = axes.get_figure(root=True)
    assert figure is not None
    right = axes.get_xlim()[1]
    texts = [
        axes.annotate(
            label.text,
            (right if in_column else label.x, label.y),
            (LABEL_OFFSET_POINTS, 0),
            textcoords="offset points",
            va="center",
            color=label.color,
            annotation_clip=False,
            bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.75, "linewidth": 0},
        )
        for label in labels
    ]
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # computes the positions of the axes and labels
    boxes, frame = [text.get_window_extent() for text in texts], axes.get_window_extent()
    height = TEXT_POINTS * LINE_HEIGHT * figure.dpi / 72
    for group in _overlapping([(box.x0, box.x1) for box in boxes]):
        centers = [(boxes[index].y0 + boxes[index].y1) / 2 for index in group]
        moved = spread(centers, height, frame.y0 + height / 2, frame.y1 - height / 2)
        for index, before, after in zip(group, centers, moved, strict=True):
            texts[index].set_position((LABEL_OFFSET_POINTS, (after - before) * 72 / figure.dpi))
            if in_column:
                label, y = labels[index], axes.transData.inverted().transform((frame.x1, after))[1]
                style: dict[str, Any] = {"linewidth": 0.7, "alpha": FAINT_ALPHA, "zorder": 1, "color": label.color}
                axes.plot((label.x, right), (label.y, y), scalex=False, scaley=False, **style)


def spread(centers: Sequence[float], height: float, low: float, high: float) -> list[float]:
    """Move intervals of equal height apart, as little as possible (least squares), until they no longer overlap.

    Args:
        centers: centers of the intervals.
        height: height of each interval.
        low: lowest center allowed; lower centers are moved up.
        high: highest center allowed; higher centers are moved down.

    Returns:
        The new centers, in the order of `centers`.
    """
    order = sorted(range(len(centers)), key=lambda index: centers[index])
    # Blocks of touching intervals, as (sum of the block positions that its intervals prefer, number of intervals).
    blocks: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        block = (centers[index] - rank * height, 1)
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            below = blocks.pop()
            block = (below[0] + block[0], below[1] + block[1])
        blocks.append(block)
    bases = [total / number for total, number in blocks for _ in range(number)]
    moved = {}
    for rank, (index, base) in enumerate(zip(order, bases, strict=True)):
        above = len(centers) - 1 - rank
        moved[index] = max(low + rank * height, min(base + rank * height, high - above * height))
    return [moved[index] for index in range(len(centers))]


def _overlapping(intervals: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Group the indices of intervals that overlap, directly or through other intervals."""
    groups: list[list[int]] = []
    end = float("-inf")
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        if not groups or intervals[index][0] > end:
            groups.append([])
        groups[-1].append(index)
        end = max(end, intervals[index][1])
    return groups
