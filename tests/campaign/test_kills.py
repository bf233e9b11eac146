"""Commands that are killed at random moments, and given again, end with the bytes of one that never was."""

import random
import signal
from pathlib import Path

import pytest

from tests.campaign.conftest import Campaign
from tests.campaign.stages import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", [stage.name for stage in STAGES])]


# Of the server while a stage that is to be killed writes to it.
UPLOAD_FAULTS = ("status", "reset", "lost_answer", "corrupt_upload")


def kill_often(campaign: Campaign, name: str, outputs: Path | str, num_kills: int) -> int:
    """Kill a stage so often, a new run after each that ends; compare each at its end, and return their number."""
    stage, draw, num_killed, num_ended = campaign.stage(name), random.Random(name), 0, 0
    while True:
        output = outputs / str(num_ended) if isinstance(outputs, Path) else f"{outputs}/{num_ended}"
        if num_killed == num_kills:
            campaign.cloud.heal()
            campaign.finish(stage, output)
            return num_ended + 1
        if not isinstance(output, Path):
            campaign.cloud.heal()
            for mode in draw.sample(UPLOAD_FAULTS, draw.randint(0, len(UPLOAD_FAULTS))):
                campaign.cloud.fault("^/upload", mode=mode, num_bytes=-50)
        process = campaign.start(stage, stage.flags(output))
        with_workers = draw.random() < 0.75  # else they learn of it by their parent's end
        seconds = draw.uniform(0, campaign.seconds(name))
        if process.kill_after(seconds, with_workers=with_workers) == -signal.SIGKILL:
            num_killed += 1
        else:
            assert process.wait() == 0, process.output
            campaign.check(stage, output)
            num_ended += 1


def described(num_ended: int) -> str:
    outputs = "the only complete output has" if num_ended == 1 else f"all {num_ended} complete outputs have"
    return f"kills: {outputs} the expected bytes"


def test_killed_at_random_moments_it_ends_with_the_same_bytes(campaign, name, num_kills, tmp_path):
    num_ended = kill_often(campaign, name, tmp_path, num_kills)
    campaign.note("kill -9", name, num_kills, described(num_ended))


def test_killed_on_cloud_storage_it_ends_with_the_same_bytes(campaign, name, num_kills):
    num_kills = max(1, num_kills // 5)
    num_ended = kill_often(campaign, name, f"{campaign.cloud.bucket_url}/output", num_kills)
    campaign.note("kill -9, on Cloud Storage", name, num_kills, described(num_ended))
