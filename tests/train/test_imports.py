"""A run of pretraining imports what its flags need: few files, so that it is soon read and soon started."""

from tests.fixtures.imported_files import PARTS_OF_A_RUN, imported_files

# If a change needs more: is a part of it for a flag alone, or do two small files belong together?
MAX_FILES = 96


def test_a_run_imports_few_files():
    """That these are all that it imports, `tests/train/test_resume.py` finds in the process of a run."""
    files = imported_files(PARTS_OF_A_RUN)
    assert len(files) <= MAX_FILES
    assert not [name for name in files if name.startswith(("train.scoring", "train.checks"))]
