"""Every command with files as ugly as people's: it reads them, or refuses them in one line that names them.

These are a sample; `tests/campaign/test_ugly_files.py` has all of them.
"""

import random

import pytest

from tests.fixtures.fuzzed_commands import FILE_COMMANDS, FOLDER_COMMANDS, Places, fed, problems_of
from tests.fixtures.ugly_folders import damages_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eagerly")]

# Drawn for each command line.
NUM_FILES, NUM_DAMAGES = 3, 1


def ids(commands: tuple[tuple[str, str], ...]) -> list[str]:
    return [" ".join(pair) for pair in commands]


@pytest.mark.parametrize(("command", "patterns"), FILE_COMMANDS, ids=ids(FILE_COMMANDS))
def test_an_ugly_file_is_read_or_refused_in_one_line(command, patterns, places: Places, tmp_path):
    files = fed(places.ugly, patterns)
    drawn = random.Random(command).sample(sorted(files), min(NUM_FILES, len(files)))
    assert problems_of(command, {name: lambda name=name: files[name] for name in drawn}, places, tmp_path) == {}


@pytest.mark.parametrize(("command", "folder"), FOLDER_COMMANDS, ids=ids(FOLDER_COMMANDS))
def test_a_damaged_folder_is_read_or_refused_in_one_line(command, folder, places: Places, tmp_path):
    damages = damages_of(places.named[folder])
    drawn = random.Random(command).sample(damages, min(NUM_DAMAGES, len(damages)))
    copies = {str(damage): lambda damage=damage: damage.copy(tmp_path / "copies") for damage in drawn}
    assert problems_of(command, copies, places, tmp_path) == {}
