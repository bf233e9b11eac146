import re
from dataclasses import replace

import pytest

from mlm_common.errors import InputError
from mlm_common.hub.redaction import redacted_hash
from tests.fixtures.recorded_runs import LENGTH, train_line, write_run
from train.compare_runs import comparison_table, describe_mask_rates, group_comparable, main
from train.metrics.run_curves import TITLES, draw_runs, read_runs
from train.model.architectures import ARCHITECTURES


def test_the_table_is_right_and_fits_100_columns(tmp_path):
    write_run(tmp_path / "small")
    write_run(tmp_path / "a-run-with-a-name-that-is-far-too-long-for-a-table", global_batch_rows=3000)
    folders = [f"{tmp_path}/small", f"{tmp_path}/a-run-with-a-name-that-is-far-too-long-for-a-table/"]
    table = comparison_table(read_runs(folders)).splitlines()
    titles = ["run", "steps", "tokens", "tokens/s", "hours", "train", "valid", "best", "gain", "accuracy"]
    assert table[0].split() == titles
    assert re.split(" {2,}", table[1]) == [
        "small", "30", "3.8 k", "128", "0.01", "5.5000", "5.2500", "5.0000", "0.7500", "25.0%",
    ]  # fmt: skip
    assert re.split(" {2,}", table[2])[:4] == ["a-run-with-…or-a-table", "30", "1.4 M", "48 k"]
    assert len({len(line) for line in table[:3]}) == 1
    assert max(map(len, table)) <= 100


def test_runs_are_grouped_by_what_they_were_evaluated_on(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", global_batch_rows=16, mlm_probability=0.3)
    write_run(tmp_path / "c", eval_shards="w", tokenizer="u")
    write_run(tmp_path / "d", eval_shards="w", tokenizer="u")
    write_run(tmp_path / "e", eval_shards="x", lines=[train_line(10, 7.0, 2.0, 64.0)])
    a, b, c, d, e = read_runs([f"{tmp_path}/{name}" for name in "abcde"])
    assert group_comparable([a, b, e]) == ("", "")  # the last one was not evaluated
    assert group_comparable([a, c, b, d])[1] == (
        "these runs have different validation rows and tokenizers, so their losses are not comparable "
        "(group 1: a, b; group 2: c, d)"
    )
    assert describe_mask_rates([a, c]) == ""
    assert "training losses are not comparable (15%: a, c; 30%: b)" in describe_mask_rates([a, b, c])


def test_records_of_the_hub_and_of_version_0_3_compare(tmp_path):
    """Which recorded no task."""
    runs = read_runs([str(write_run(tmp_path / name)) for name in "cd"])
    runs[1].record["fingerprint"]["eval_shards"] = redacted_hash(["v"])
    assert group_comparable(runs) == ("", "")
    run, other = read_runs([str(write_run(tmp_path / name)) for name in "ab"])
    older = replace(other, record={name: value for name, value in other.record.items() if name != "task"})
    assert comparison_table([run, older]) == comparison_table([run, other])
    assert group_comparable([run, older]) == ("", "")
    assert (older.metric, older.is_finetuned) == (run.metric, False)
    assert draw_runs([older]).startswith(b"\x89PNG")


def test_the_time_of_training_is_that_of_the_steps(tmp_path):
    (run,) = read_runs([str(write_run(tmp_path / "run"))])
    assert [run.training_seconds(step) for step in (0, 5, 10, 20, 25, 30)] == [0, 10, 20, 30, 35, 40]
    assert run.tokens_after(30) == 30 * 8 * LENGTH


def test_the_command_on_a_real_run(finished_run, tmp_path, run, caplog):
    other = write_run(tmp_path / "other")
    outcome = run(main, "--runs", finished_run, other, "--picture", tmp_path / "runs.svg")
    assert "other" in outcome.out.splitlines()[2]
    warning = "these runs have different validation rows and tokenizers, so their losses are not comparable (group 1: "
    assert warning in caplog.text
    drawn = (tmp_path / "runs.svg").read_text(encoding="utf-8")
    assert "Different validation rows and tokenizers: compare each run with its baseline" in drawn


def test_bad_input(tmp_path, run):
    with pytest.raises(InputError, match=r"--runs: .* has no metrics\.jsonl yet"):
        read_runs([str(tmp_path)])
    refused = run(main, "--runs", write_run(tmp_path / "run"), "--picture", tmp_path / "runs.jpg")
    assert "--picture must be a PNG or SVG file" in refused.refusal


def test_each_architecture_has_a_title():
    assert TITLES.keys() == ARCHITECTURES.keys()
