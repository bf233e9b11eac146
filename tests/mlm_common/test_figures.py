"""Labels at the ends of lines: none covers another, and none is far from its line without need; names in any script."""

import pytest

from mlm_common.figures import EndLabel, image_of, label_ends, new_figure, spread


@pytest.mark.parametrize(
    ("centers", "expected"),
    [
        ([], []),
        ([50.0], [50.0]),
        ([20.0, 50.0], [20.0, 50.0]),
        ([50.0, 50.0], [45.0, 55.0]),
        ([52.0, 50.0], [56.0, 46.0]),
        ([50.0, 51.0, 59.0], [43.333333, 53.333333, 63.333333]),
        ([1.0, 99.0], [5.0, 95.0]),
        ([0.0, 1.0, 2.0], [5.0, 15.0, 25.0]),
    ],
)
def test_labels_are_moved_apart_within_the_axes(centers, expected):
    assert spread(centers, 10, 5, 95) == pytest.approx(expected)


def test_characters_that_no_font_has_give_no_warnings(recwarn):
    with new_figure() as figure:
        figure.suptitle("\U000e0100\U0010fffd")
        label_ends(figure.add_subplot(), [EndLabel(0, 0, "\U0010fffd", "black")])
        assert image_of(figure).startswith(b"\x89PNG")
    # Others' warnings may come meanwhile, of files that the garbage collector closes.
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
