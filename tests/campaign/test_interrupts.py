"""Every command interrupted at random moments: one line, its status, an end without delay, and nothing lost."""

import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mlm_common.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.campaign.conftest import Campaign
from tests.campaign.processes import Process
from tests.campaign.report import stage_of
from tests.campaign.stages import STAGES
from tests.fixtures.bert_tfrecords import documents, instances, write_files, write_tokenizer
from tests.fixtures.fuzzed_commands import Places

pytestmark = pytest.mark.slow

STAGE_NAMES = [stage.name for stage in STAGES]
# A command that has not ended by then, after its last line, waits for something that never comes.
HANG_SECONDS = 60.0
# What is sent, how often.
INTERRUPTS = ((signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGINT, 2), (signal.SIGTERM, 1))
_FINETUNE = "--max-seq-length 24 --length-buckets 24 --per-replica-batch-size 4 --max-steps 8 --save-steps 3"
FINETUNE = f"--init-from {{start}} {_FINETUNE} --output-dir {{out}}"
# {NAME} is one of `Places.named` or of `more_places`, {out} the path of what a command writes.
COMMANDS = (
    "tokenizer_training.train_unigram --data-files {many} --dry-run --output-dir {out}",
    "tokenizer_training.compare_tokenizers {tokenizer} {start} --data-files {many}",
    "tfrecord_prep.prepare_tfrecord_shards --verify --output-dir {shards}",
    "tfrecord_prep.import_bert_tfrecords --tokenizer-name-or-path {words} --data-files {records} --output-dir {out}",
    "train.doctor --preset tiny-cpu --train-dataset {train} --output-dir {out}",
    "train.tpu_preflight --topology v5e-1 --preset tiny-cpu --train-dataset {train} --output-dir {out} --dry-run",
    "train.fill_mask --model {start} --text many[MASK]",
    "train.score_mlm --model {start} --text {many} --num-words 50 --output {out}/scores.json",
    "train.export {run} {out}",
    "train.convert_bert {google} {out}",
    "train.compare_runs --runs {run} {classified} --picture {out}.svg",
    f"finetuning.run_classification {FINETUNE} --task-name sst2 --glue-dir {{glue}}",
    f"finetuning.run_tagging {FINETUNE} --train-file {{tagged}}/../train.conll",
    f"finetuning.run_multiple_choice {FINETUNE} --train-file {{chosen}}/../train.jsonl",
    f"finetuning.run_qa {FINETUNE} --doc-stride 6 --train-file {{answered}}/../train.json",
    f"finetuning.run_embedding {FINETUNE} --train-file {{embedded}}/../train.jsonl",
    f"finetuning.run_task {FINETUNE} --task {{task}} --train-file {{rated}}/train.tsv",
    "finetuning.predict --model {classified} --text-column-names text --file {fine_rows} --output {out}.tsv",
    "finetuning.predict --model {answered} --file {answered}/../validation.json --output {out}.json",
    "finetuning.search many --model {embedded} --corpus {many} --vectors-dir {out}",
    "finetuning.glue_submission --runs {classified} --output {out}.zip",
    "recipes.whiten {start} {many} {out} --max-seq-length 24",
)


class Interrupted(NamedTuple):
    """One interrupt.

    is_stopped: it came before the command's end.
    seconds: from the command's last line to the prompt.
    """

    is_stopped: bool
    seconds: float


def interrupt(process: Process, sent: signal.Signals, num_times: int, draw: random.Random) -> Interrupted:
    """Interrupt a command, and check how it ends."""
    for _ in range(num_times):
        process.send(sent)
        process.wait(draw.uniform(0, 0.3))
    sent_seconds = time.monotonic()
    while (status := process.wait(0.01)) is None:
        if min(time.monotonic() - sent_seconds, process.quiet_seconds) > HANG_SECONDS:
            process.send(signal.SIGKILL)
            pytest.fail(f"It hangs: {process.output}")
    return Interrupted(check_stopped(process, status, sent, num_times), process.quiet_seconds)


def interrupt_often(
    start: Callable[[int], Process], most_seconds: float, num_tries: int, seed: str
) -> list[Interrupted]:
    """Interrupt a command so often; `start` starts it, given how often it has come to its end."""
    draw, outcomes = random.Random(seed), []
    for number in range(num_tries):
        process = start(sum(not outcome.is_stopped for outcome in outcomes))
        began_seconds = time.monotonic()
        process.wait(draw.uniform(0, most_seconds))
        seconds = time.monotonic() - began_seconds
        outcomes.append(interrupt(process, *INTERRUPTS[number % len(INTERRUPTS)], draw))
        if not outcomes[-1].is_stopped:  # it takes less than was measured
            most_seconds = min(0.7 * most_seconds, seconds)
    return outcomes


def described(outcomes: list[Interrupted]) -> str:
    seconds = [outcome.seconds for outcome in outcomes if outcome.is_stopped] or [0.0]
    middle, most = statistics.median(seconds), max(seconds)
    num_stopped = sum(outcome.is_stopped for outcome in outcomes)
    return (
        f"interrupts: {num_stopped} came before the command's end; the prompt returned {middle:.1f} s after the last "
        f"line (median; at most {most:.1f} s)"
    )


def check_stopped(process: Process, status: int, sent: int, num_times: int) -> bool:
    """Check the status of a command and what it said; return whether it was stopped before its end."""
    allowed = {0, EXIT_STOPPED} | ({EXIT_INTERRUPTED} if sent == signal.SIGINT else set())
    allowed |= {-signal.SIGINT} if (sent, num_times) == (signal.SIGINT, 2) else set()
    assert status in allowed, (status, process.output)
    for word in ("Traceback", "error:", "Exception ignored"):
        assert word not in process.errors, process.errors
    said = [line for line in process.errors.splitlines() if line.startswith(("Stopp", "Stopped"))]
    assert len(said) <= 2, process.errors
    assert said or status in (0, -signal.SIGINT), process.errors
    return status != 0


@pytest.fixture(scope="module")
def seen(_campaign: Campaign) -> Iterator[dict[str, list[Interrupted]]]:
    """What is seen, by stage, for the report."""
    by_stage: dict[str, list[Interrupted]] = defaultdict(list)
    yield by_stage
    for stage, interrupts in by_stage.items():
        _campaign.note("Ctrl-C or SIGTERM, once or twice", stage, len(interrupts), described(interrupts))


@pytest.mark.parametrize("name", STAGE_NAMES)
def test_stages_are_stopped_and_continue(campaign, seen, name, num_kills, tmp_path):
    """Outputs that are stopped again and again end as that of a run that never was."""
    stage = campaign.stage(name)

    def start(num_ended: int) -> Process:
        return campaign.processes.start(stage.module, stage.flags(tmp_path / str(num_ended)), as_script=True)

    seen[name] += interrupt_often(start, campaign.seconds(name), max(2, num_kills // 4), name)
    for output in tmp_path.iterdir():
        campaign.finish(stage, output)


@pytest.fixture(scope="module")
def more_places(
    places: Places, tiny_start: Path, rated: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Places of examples, and of records of another program."""
    folder = tmp_path_factory.mktemp("more")
    words = write_tokenizer(folder)
    (folder / "records").mkdir()
    records = Path(write_files(folder / "records", instances(documents(words), dupe_factor=2)))
    return {**places.named, "words": words, "records": records, "rated": rated, "glue": tiny_start / "glue"}


def files_of(folder: Path) -> set[str]:
    """List what a command has written, but for checkpoints and logs of TensorBoard, of which each start has its own."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {path for path in paths if "checkpoints/" not in path and "events.out" not in path}


@pytest.mark.parametrize("command", COMMANDS, ids=[command.partition(" --")[0] for command in COMMANDS])
def test_commands_are_stopped_and_given_again(command, campaign, seen, more_places, num_kills, tmp_path):
    """In the end they have written the files that one that never was stopped writes."""

    def start(name: int | str) -> Process:
        output = tmp_path / str(name)
        output.mkdir(exist_ok=True)
        return campaign.processes.start_afresh(command.format(**more_places, out=output / "out").split())

    began_seconds = time.monotonic()
    process = start("undisturbed")
    assert process.wait() == 0, process.output
    seconds = time.monotonic() - began_seconds

    def start_ready(num_ended: int) -> Process:
        process = start(num_ended)
        process.wait_for_handlers()
        return process

    outcomes = interrupt_often(start_ready, seconds, max(2, num_kills // 16), command)
    print(command.partition(" ")[0], described(outcomes))
    seen[stage_of(command)] += outcomes
    process = start(sum(not outcome.is_stopped for outcome in outcomes))
    assert process.wait() == 0, process.output
    for output in tmp_path.iterdir():
        assert files_of(output) == files_of(tmp_path / "undisturbed")
