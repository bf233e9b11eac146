"""docs/resume.md: its table of exit statuses is that of the code."""

import re
from pathlib import Path

from mlm_common import errors

PAGE = (Path(__file__).parents[2] / "docs" / "resume.md").read_text(encoding="utf-8")
# {status: what the supervisor does}
ROWS = {int(row[1]): row[2] for row in re.finditer(r"^\| (\d+) \| .* \| (.*) \|$", PAGE, re.MULTILINE)}


def test_the_table_has_each_status_and_no_other() -> None:
    assert set(ROWS) == {0} | {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_the_table_says_which_statuses_the_supervisor_tries_again() -> None:
    assert set(ROWS.values()) == {"ends", "tries again"}
    assert {status for status, supervisor in ROWS.items() if supervisor == "ends"} == errors.FINAL_STATUSES
