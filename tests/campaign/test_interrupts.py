"""Every command interrupted at random moments: one line, its status, an end without delay, and nothing lost."""

import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_common.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.campaign.conftest import Campaign
from tests.campaign.processes import Process
from tests.campaign.stages import STAGES

pytestmark = pytest.mark.slow

STAGE_NAMES = [stage.name for stage in STAGES]
# A command that has not ended by then, after its last line, waits for something that never comes.
HANG_SECONDS = 60.0
# What is sent, how often.
INTERRUPTS = ((signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGTERM, 2))
TEXTS = "".join(f"{text}\t{label}\n" for text, label in [("many small words", "a"), ("something else", "b")] * 8)


def interrupt_often(
    campaign: Campaign, module: str, make_flags: Callable[[int], list[str]], most_seconds: float, num_tries: int
) -> str:
    """Interrupt a command so often, check how it ends, and describe how long that took after its last line.

    `make_flags` makes its flags, by the number of times that it has come to its end.
    """
    draw, seconds, num_stopped = random.Random(module), [], 0
    for number in range(num_tries):
        sent, num_times = INTERRUPTS[number % len(INTERRUPTS)]
        process = campaign.processes.start(module, make_flags(number - num_stopped), as_script=True)
        process.wait(draw.uniform(0, most_seconds))
        for _ in range(num_times):
            process.send(sent)
            process.wait(draw.uniform(0, 0.3))
        sent_seconds = time.monotonic()
        while (status := process.wait(0.01)) is None:
            if min(time.monotonic() - sent_seconds, process.quiet_seconds) > HANG_SECONDS:
                process.send(signal.SIGKILL)
                pytest.fail(f"{module} hangs: {process.output}")
        seconds.append(process.quiet_seconds)
        if check_stopped(process, status, sent, num_times):
            num_stopped += 1
        else:
            most_seconds *= 0.7  # it takes less than was measured
    middle, most = statistics.median(seconds), max(seconds)
    return f"{num_stopped} stopped, the prompt {middle:.1f} s after the last line, at most {most:.1f} s"


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


@pytest.mark.parametrize("name", STAGE_NAMES)
def test_stages_are_stopped_and_continue(campaign, name, num_kills, tmp_path):
    """Outputs that are stopped again and again end as that of a run that never was."""
    stage, num_tries = campaign.stage(name), max(4, num_kills // 4)

    def make_flags(num_ended: int) -> list[str]:
        return stage.flags(tmp_path / str(num_ended))

    ended = interrupt_often(campaign, stage.module, make_flags, campaign.seconds(name), num_tries)
    for output in tmp_path.iterdir():
        campaign.finish(stage, output)
    campaign.note("Ctrl-C, SIGTERM", name, num_tries, f"{ended}; the same bytes")


@pytest.fixture(scope="module")
def models(_campaign: Campaign, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pretrained and a fine-tuned model, and a table of texts."""
    folder = tmp_path_factory.mktemp("models")
    _campaign.stage("training")
    table = folder / "texts.tsv"
    table.write_text(f"text\tlabel\n{TEXTS}", encoding="utf-8")
    flags = ["--init-from", str(_campaign.folder / "training"), "--train-file", str(table), "--max-steps", "3"]
    flags += ["--max-seq-length", "16", "--output-dir", str(folder / "classifier")]
    process = _campaign.processes.start("finetuning.run_classification", flags)
    assert process.wait() == 0, process.output
    return {"model": _campaign.folder / "training", "table": table, "classifier": folder / "classifier"}


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("train.fill_mask", "--model {model} --text many[MASK]"),
        ("train.score_mlm", "--model {model} --text {source}/docs-0.txt --num-words 50 --output {output}/scores.json"),
        ("train.export", "{model} {output}/export"),
        ("train.compare_runs", "--runs {model} {model} --picture {output}/runs.svg"),
        (
            "finetuning.run_classification",
            "--init-from {model} --train-file {table} --max-steps 8 --max-seq-length 16 --output-dir {output}/run",
        ),
        ("finetuning.predict", "--model {classifier} --file {table}"),
        ("tokenizer_training.train_unigram", "--data-files {source}/text.txt --dry-run --output-dir {output}/dry"),
    ],
)
def test_other_commands_are_stopped(campaign, module, flags, models, num_kills, tmp_path):
    """Each time it starts from the beginning."""

    def make_flags(num_ended: int) -> list[str]:
        (tmp_path / str(num_ended)).mkdir(exist_ok=True)
        places = {**models, "source": campaign.stage("tokenizer").folder, "output": tmp_path / str(num_ended)}
        return flags.format(**places).split()

    began_seconds = time.monotonic()
    process = campaign.processes.start(module, make_flags(-1), as_script=True)
    assert process.wait() == 0, process.output
    most_seconds = time.monotonic() - began_seconds
    print(module, interrupt_often(campaign, module, make_flags, most_seconds, max(4, num_kills // 5)))
    process = campaign.processes.start(module, make_flags(-1), as_script=True)
    assert process.wait() == 0, process.output
