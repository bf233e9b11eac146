"""The table of faults: what the campaign wrote into it, of every fault in every stage."""

import re
from pathlib import Path

from tests.campaign.report import BEGIN, END, PROMISES
from tests.campaign.stages import STAGES

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "reliability.md"


def test_every_fault_was_tried_in_every_stage():
    (table,) = re.findall(f"{BEGIN}\n(.*){END}", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    heading, _, *rows = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    assert heading == ["fault", "promised", *(stage.name for stage in STAGES)]
    assert {row[0]: row[1] for row in rows} == PROMISES
    for fault, _, *cells in rows:
        nums_tried = [int(re.match(r"([\d,]+): ", cell)[1].replace(",", "")) for cell in cells]
        assert min(nums_tried) >= (100 if fault == "kill -9" else 1), fault
