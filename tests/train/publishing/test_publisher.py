import pytest

from mlm_common.storage import open_folder
from tests.servers.fixtures import CloudStorageHandle
from train.publishing.publisher import read_log_files


def test_files_of_the_log_that_cannot_be_read_are_left_out_of_an_export(
    cloud: CloudStorageHandle, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("loss.png", "tensorboard/events.out.tfevents.1", "tensorboard/events.out.tfevents.2"):
        cloud.put(f"run/{name}", name.encode())
    run = open_folder(f"{cloud.bucket_url}/run")
    assert len(read_log_files(run)) == 3
    assert not caplog.text
    cloud.fault("tfevents.2", status=403)
    assert set(read_log_files(run)) == {"loss.png", "runs/events.out.tfevents.00000"}
    assert "the export is made without some files of the log" in caplog.text
