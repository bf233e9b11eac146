from hypothesis import given
from hypothesis import strategies as st

from train.checks.preflight.tpu_compiler import MemoryUse, largest_fitting

LIMIT = 1000


def search(fixed, per_row, first_rows, saved_above=None):
    """Find (answer, the batches measured) where memory is affine, but past `saved_above` rows grows at a tenth."""
    measured = []

    def used(rows):
        if saved_above is None or rows <= saved_above:
            return fixed + per_row * rows
        return fixed + per_row * (saved_above + (rows - saved_above) / 10)

    def measure(rows):
        measured.append(rows)
        return MemoryUse(used(rows) <= LIMIT, int(used(rows)), fixed, LIMIT)

    return largest_fitting(measure, first_rows), measured


def test_few_compilations_where_memory_is_affine():
    assert search(fixed=100, per_row=9, first_rows=16) == (96, [16, 64, 96, 104])
    assert search(fixed=100, per_row=9, first_rows=96) == (96, [96, 104])
    assert search(fixed=100, per_row=9, first_rows=400) == (96, [400, 96, 104])


def test_where_the_compiler_saves_memory_near_the_limit():
    answer, measured = search(fixed=0, per_row=10, first_rows=8, saved_above=80)
    assert answer == 280
    assert len(measured) <= 12


def test_memory_that_shrinks_does_not_cause_a_leap():
    """As libtpu 0.0.42.1 has it for a RoBERTa-base on a v6e, in hundredths of GiB (392 rows: between 384 and 400)."""
    used = {344: 2938, 360: 3106, 368: 3069, 376: 3157, 384: 3158, 392: 3221}
    measured = []

    def measure(rows):
        measured.append(rows)
        return MemoryUse(rows <= 376, used[rows], 145, 3125)

    assert largest_fitting(measure, 344) == 376
    assert measured == [344, 360, 368, 392, 376, 384]


@given(
    fixed=st.integers(0, 1100),
    per_row=st.floats(0.01, 200),
    first_rows=st.integers(1, 2000),
    saved_above=st.none() | st.integers(1, 500),
)
def test_the_answer_fits_and_the_next_does_not(fixed, per_row, first_rows, saved_above):
    answer, measured = search(fixed, per_row, first_rows, saved_above)
    assert len(measured) == len(set(measured))
    assert (answer or 0) + 8 in measured
    assert answer is None or answer in measured

    def use(rows):
        below = rows if saved_above is None or rows <= saved_above else saved_above + (rows - saved_above) / 10
        return fixed + per_row * below

    assert answer is None or use(answer) <= LIMIT
    assert use((answer or 0) + 8) > LIMIT
    assert len(measured) <= 32
