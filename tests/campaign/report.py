"""What the campaign has seen, as lines of JSON, and the table of docs/design/reliability.md that is made of them.

`python -m tests.campaign.report LINES docs/design/reliability.md` writes the table between its marks.
"""

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"

# {fault: what is promised of it}, in the order of the table. "Expected" is what an undisturbed run writes.
PROMISES = {
    "kill -9": "run again, the same command writes the expected bytes",
    "kill -9, on Cloud Storage": "run again, the same command writes the expected bytes",
    "SIGTERM": "the command ends with status 75; run again, it writes the expected bytes",
    "Ctrl-C or SIGTERM, once or twice": "the command prints one line and ends; run again, it writes the expected files",
    "SIGSTOP, takeover by a second run, SIGCONT": "the second run finishes; the first run reports that it lost the "
    "folder, and changes no file",
    "a second run": "the second run is refused while the first is running; the first run finishes",
    "disk full": "a one-line error; once there is room, the same command writes the expected bytes",
    "read-only disk": "an immediate one-line error; no file is changed",
    "HTTP status 429, 500 or 503": "the request is retried; the output has the expected bytes",
    "connection reset or answer lost": "the request is retried; the output has the expected bytes",
    "truncated or corrupt transfer": "damage is noticed, and the transfer retried; the output has the expected bytes",
    "slow answers": "the output has the expected bytes",
    "Cloud Storage unavailable": "a one-line error; once it is available, the same command writes the expected bytes",
    "Hub unavailable": "a one-line error; the output is on disk; once the Hub is available, the same command pushes it",
    "clock set back by an hour": "the output has the expected bytes",
    "faulty input, fixed later": "only output that depends on the fault is rebuilt; the bytes are the same as with "
    "correct input from the start",
    "malformed files, damaged folders": "the input is read, or a one-line error names the file",
    "odd environment": "the command works with unusual environment variables, without standard error, and when nobody "
    "reads its output",
    "changed input": "an error says what differs, or an unfinished preparation rebuilds the partitions concerned",
}
# What every command meets.
OF_COMMANDS = ("Ctrl-C or SIGTERM, once or twice", "malformed files, damaged folders", "odd environment")
# {first word of a command's module: its stage}
STAGES_OF_PACKAGES = {"tokenizer_training": "tokenizer", "tfrecord_prep": "shards", "train": "training"}
FINETUNING = "fine-tuning"


def stage_of(command: str) -> str:
    """Name the stage of a command, whose module is its first word."""
    return STAGES_OF_PACKAGES.get(command.partition(".")[0], FINETUNING)


@dataclass(frozen=True)
class Seen:
    """What one test saw of a fault in a stage: how often it was tried; what that counts and how it ended, in words."""

    fault: str
    stage: str
    num_tries: int
    ended: str


def write_line(path: str | None, seen: Seen) -> None:
    """Append it to the file, if there is one; several processes may do so."""
    assert seen.fault in PROMISES, seen.fault
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(seen)) + "\n")


def table(lines: list[Seen], stages: tuple[str, ...]) -> str:
    """Make the table; of a fault in a stage the last line counts."""
    cells = {(seen.fault, seen.stage): f"{seen.num_tries:,} {seen.ended}" for seen in lines}
    rows = [["fault", "promised", *stages]]
    rows += [[fault, said, *(cells.get((fault, stage), "-") for stage in stages)] for fault, said in PROMISES.items()]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(lines_path: str, document_path: str) -> None:
    """Put the table into the document."""
    from tests.campaign.stages import STAGES

    lines = [Seen(**json.loads(line)) for line in Path(lines_path).read_text(encoding="utf-8").splitlines()]
    document = Path(document_path)
    text = document.read_text(encoding="utf-8")
    stages = (*(stage.name for stage in STAGES), FINETUNING)
    made = f"{BEGIN}\n{table(lines, stages)}\n{END}"
    document.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: made, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
