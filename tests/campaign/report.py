"""What the campaign has seen, as lines of JSON, and the table of docs/design/reliability.md that is made of them.

`python -m tests.campaign.report LINES docs/design/reliability.md` writes the table between its marks.
"""

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"

# {fault: what is promised of it}, in the order of the table.
PROMISES = {
    "kill -9": "run again, the same command gives the same bytes",
    "kill -9, on Cloud Storage": "run again, the same command gives the same bytes",
    "SIGTERM": "ends with 75; run again, the same command gives the same bytes",
    "Ctrl-C, SIGTERM": "one line, then the prompt; run again, the same command gives the same files",
    "SIGSTOP, takeover, SIGCONT": "the other run finishes; the one that wakes up says so and touches nothing",
    "a second run": "an error while the first is alive; the first finishes",
    "disk full": "one line; once there is room, the same command gives the same bytes",
    "read-only disk": "one line, at once; nothing is changed",
    "429, 500, 503": "retried: the same bytes",
    "connection reset, answer lost": "retried: the same bytes",
    "truncated, corrupt": "noticed and retried: the same bytes",
    "slow": "the same bytes",
    "Cloud Storage away": "one line; once it is back, the same command gives the same bytes",
    "Hub away": "one line, the files are there; once it is back, the same command pushes them",
    "clock back by an hour": "the same bytes",
    "a fixed input": "only what depends on it is rebuilt; the same bytes as with it from the start",
    "ugly files, damaged folders": "read, or one line that names the file",
    "odd environment": "the command works: odd variables, no standard error, an output that nobody reads",
    "a changed input": "an error that says what differs; an unfinished preparation rebuilds its partitions",
}
# What every command meets.
OF_COMMANDS = ("Ctrl-C, SIGTERM", "ugly files, damaged folders", "odd environment")
# {first word of a command's module: its stage}
STAGES_OF_PACKAGES = {"tokenizer_training": "tokenizer", "tfrecord_prep": "shards", "train": "training"}
FINETUNING = "fine-tuning"


def stage_of(command: str) -> str:
    """Name the stage of a command, whose module is its first word."""
    return STAGES_OF_PACKAGES.get(command.partition(".")[0], FINETUNING)


@dataclass(frozen=True)
class Seen:
    """What one test saw of a fault in a stage: how often it was tried, and how it ended, in words."""

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
    cells = {(seen.fault, seen.stage): f"{seen.num_tries:,}: {seen.ended}" for seen in lines}
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
