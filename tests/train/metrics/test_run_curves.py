import io
from pathlib import Path

import pytest
from matplotlib.image import imread

from mlm_common.errors import InputError
from tests.fixtures.recorded_runs import LENGTH, train_line, validation_line, write_run
from tests.servers.fixtures import CloudStorageHandle
from train.compare_runs import main
from train.metrics.run_curves import comparison_table, draw_runs, read_runs


def test_the_table_is_right(tmp_path: Path) -> None:
    write_run(tmp_path / "small")
    write_run(tmp_path / "large", global_batch_rows=3000)
    table = comparison_table(read_runs([f"{tmp_path}/small", f"{tmp_path}/large/"])).splitlines()
    titles = ["run", "steps", "tokens/step", "tokens", "tokens/s", "hours", "train", "validation", "best", "accuracy"]
    assert table[0].split() == titles
    assert table[1].split() == ["small", "30", "128", "3,840", "128", "0.01", "5.5000", "5.2500", "5.0000", "25.0%"]
    assert table[2].split()[:5] == ["large", "30", "48,000", "1,440,000", "48,000"]
    assert len({len(line) for line in table}) == 1


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    write_run(tmp_path / "run", unigram_entropy_nats=None, lines=[train_line(10, 7.0, 2.0, 64.0)])
    (run,) = read_runs([str(tmp_path / "run")])
    assert comparison_table([run]).splitlines()[1].split()[-4:] == ["7.0000", "-", "-", "-"]
    assert draw_runs([run]).startswith(b"\x89PNG")
    only_evaluated = write_run(tmp_path / "other", lines=[validation_line(5, 6.5)])
    assert comparison_table(read_runs([str(only_evaluated)])).splitlines()[1].split()[4:7] == ["-", "0.00", "-"]


def test_the_time_of_training_is_that_of_the_steps(tmp_path: Path) -> None:
    (run,) = read_runs([str(write_run(tmp_path / "run"))])
    assert [run.training_seconds(step) for step in (0, 5, 10, 20, 25, 30)] == [0, 10, 20, 30, 35, 40]
    assert run.step_tokens == 8 * LENGTH


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "model")
    runs = read_runs([f"{tmp_path}/a/model", f"{tmp_path}/b/model"])
    assert [run.name for run in runs] == ["a/model", "b/model"]


def test_the_picture_shows_what_runs_have(tmp_path: Path) -> None:
    runs = read_runs([str(write_run(tmp_path / name, global_batch_rows=rows)) for name, rows in (("a", 8), ("b", 16))])
    one, both = (imread(io.BytesIO(draw_runs(chosen))) for chosen in (runs[:1], runs))
    assert one.shape[:2] == both.shape[:2] == (400, 1100)
    assert (one != both).any()


def test_the_command_on_a_run_in_cloud_storage(
    tmp_path: Path, cloud: CloudStorageHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in write_run(tmp_path / "run").iterdir():
        cloud.put(f"run/{path.name}", path.read_bytes())
    folder = f"{cloud.bucket_url}/run"
    assert main(["--runs", folder, "--picture", f"{folder}/comparison.png"]) == 0
    assert "5.2500" in capsys.readouterr().out
    assert cloud.objects()["run/comparison.png"].startswith(b"\x89PNG")


def test_the_command_on_a_real_run(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["--runs", str(finished_run), "--picture", str(tmp_path / "runs.png")]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("finished-run")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"--runs must name output folders .* has no metrics\.jsonl yet"):
        read_runs([str(tmp_path)])
    run = write_run(tmp_path / "run")
    assert main(["--runs", str(run), "--picture", str(tmp_path / "runs.jpg")]) == 2
    assert "--picture must be a PNG file" in capsys.readouterr().err
