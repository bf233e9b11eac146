"""Stage 2 on Apache Beam: the bytes of the local run, also after a failed one, and what is refused beforehand."""

import importlib.util
import sys
from pathlib import Path

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Corpus, open_corpus
from mlm_common.corpus.text_files import ByteRange
from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage.reading import StoredFile
from tests.fixtures.partitions import split_work
from tests.fixtures.tiny_corpus import contents, flags, write_source
from tfrecord_prep.beam_pipeline import MAX_INLINE_BYTES, check_beam, work_with_beam
from tfrecord_prep.config import PrepareConfig
from tfrecord_prep.manifest import read_manifest
from tfrecord_prep.partition import NumberedPartition
from tfrecord_prep.prepare_tfrecord_shards import main
from tfrecord_prep.split_folder import read_sidecar

needs_beam = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None or importlib.util.find_spec("google.cloud.dataflow") is None,
    reason="needs Apache Beam and Dataflow's client: pip install -e '.[test]'",
)
TWO_PROCESSES = ["--runner", "DirectRunner", "--num-workers", "2"]
IN_THIS_PROCESS = "--direct_running_mode=in_memory --direct_num_workers=1"
ONE_PROCESS = ["--runner", "DirectRunner", f"--beam-options={IN_THIS_PROCESS}"]
GOOGLE = "--project=my-project --region=europe-west4 --temp_location=gs://bucket/tmp"


@pytest.fixture(autouse=True)
def tokenizers_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undone after the test, as a pipeline in this process sets it."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def local_bytes(source: Path, folder: Path, *extra_flags: str) -> dict[str, bytes]:
    assert main(flags(source, folder, *extra_flags)) == 0
    return contents(folder)


def in_memory_config(folder: Path) -> PrepareConfig:
    return PrepareConfig("tokenizer", str(folder), runner="DirectRunner", beam_options=IN_THIS_PROCESS)


@pytest.mark.slow
@needs_beam
def test_two_processes_write_the_bytes_of_the_local_run(tmp_path):
    source = write_source(tmp_path)
    with (source / "docs.jsonl").open("ab") as docs:
        docs.write(b'{"text": 17}\n{"text": "last"}\n')
    extra_flags = ["--chunking", "segment_pairs", "--on-bad-row", "skip"]
    assert main(flags(source, tmp_path / "beam", *extra_flags, *TWO_PROCESSES)) == 0
    assert contents(tmp_path / "beam") == local_bytes(source, tmp_path / "local", *extra_flags)
    assert read_manifest(str(tmp_path / "beam" / "train")).bad_rows.num_rows == 1


@pytest.mark.slow
@needs_beam
def test_cloud_storage_in_and_out(source, tmp_path, cloud):
    cloud.put("docs.jsonl", (source / "docs.jsonl").read_bytes())
    draw = ["--validation-percent", "20"]
    files = ["--data-files", f"{cloud.bucket_url}/docs.jsonl"]
    assert main(flags(source, f"{cloud.bucket_url}/beam", *files, *draw, *ONE_PROCESS)) == 0
    written = {name: data for name, data in cloud.objects().items() if name.endswith(".tfrecord")}
    local = local_bytes(source, tmp_path / "local", *draw)
    assert written == {f"beam/{name}": data for name, data in local.items() if name.endswith(".tfrecord")}
    assert not any("partition-" in name or "plan.json" in name for name in cloud.objects())


@needs_beam
def test_after_a_row_is_fixed_the_run_resumes(tmp_path, capfd):
    source = write_source(tmp_path)
    (source / "more.jsonl").write_bytes(good := (source / "docs.jsonl").read_bytes())
    files = ["--data-files", str(source / "docs.jsonl"), str(source / "more.jsonl")]
    with_beam = flags(source, tmp_path / "beam", *files, *ONE_PROCESS)
    (source / "more.jsonl").write_bytes(good[:-3] + b"!}\n")
    assert main(with_beam) == 2
    assert "must contain one JSON object per line" in capfd.readouterr().err.strip().splitlines()[-1]
    folder = tmp_path / "beam" / "train"
    shards = {path: path.stat().st_mtime_ns for path in folder.glob("dataset-00000-*")}
    assert not (folder / "manifest.json").exists()
    assert (folder / "partition-00000.json").exists()

    (source / "more.jsonl").write_bytes(good)
    assert main(with_beam) == 0
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert contents(tmp_path / "beam") == local_bytes(source, tmp_path / "local", *files)


@needs_beam
def test_few_documents_go_with_the_pipeline(tmp_path):
    work = split_work(tmp_path)
    options = check_beam(in_memory_config(tmp_path), open_corpus(work.corpus))
    partitions = [NumberedPartition(3, "a", ["5 6"]), NumberedPartition(1, "b", ["7"])]
    assert list(work_with_beam(work, partitions, options)) == [3, 1]
    assert read_sidecar(str(tmp_path), "partition-00003.json").totals.num_documents == 1

    too_much = (NumberedPartition(number, "a", ["x" * (MAX_INLINE_BYTES // 8)]) for number in range(100))
    with pytest.raises(InputError, match="Pass --data-files without --limit, or --runner local"):
        list(work_with_beam(work, too_much, options))
    assert next(too_much).index == 9


@needs_beam
def test_a_failure_that_is_no_bad_input_says_how_to_resume(tmp_path):
    work = split_work(tmp_path, chunking="none such")
    options = check_beam(in_memory_config(tmp_path), open_corpus(work.corpus))
    with pytest.raises(RunFailedError, match=r"none such.* Run the same command again"):
        list(work_with_beam(work, [NumberedPartition(0, "a", ["5 6"])], options))


@needs_beam
@pytest.mark.parametrize(
    ("runner", "beam_options", "message"),
    [
        ("DirectRunner", "--direct_num_workerz=3", "does not know: direct_num_workerz"),
        ("DataflowRunner", "--project=p", "needs --region, --temp_location"),
        ("DataflowRunner", GOOGLE.replace("my-project", "My_Project"), "Invalid Project ID"),
        ("DataflowRunner", GOOGLE, "read gs:// files only.*docs.jsonl"),
    ],
)
def test_what_beam_cannot_do_is_refused(source, runner, beam_options, message):
    corpus = open_corpus(CorpusConfig(data_files=[str(source / "docs.jsonl")]))
    config = PrepareConfig("tokenizer", "gs://bucket/shards", runner=runner, beam_options=beam_options)
    with pytest.raises(InputError, match=message):
        check_beam(config, corpus)


@needs_beam
def test_dataflow_gets_gs_files_and_the_options_given(cloud):
    cloud.put("docs.jsonl", b'{"text": "a"}\n')
    corpus = open_corpus(CorpusConfig(data_files=[f"{cloud.bucket_url}/docs.jsonl"]))
    beam_options = f"{GOOGLE} --max_num_workers=20"
    config = PrepareConfig("tokenizer", "gs://bucket/shards", runner="DataflowRunner", beam_options=beam_options)
    given = check_beam(config, corpus).get_all_options()
    assert (given["runner"], given["project"], given["max_num_workers"]) == ("DataflowRunner", "my-project", 20)
    assert given["number_of_worker_harness_threads"] == 1


@needs_beam
def test_dataflow_can_be_given_the_pipeline():
    """All of the job's description is made, and by Beam's own --dry_run not sent."""
    corpus = CorpusConfig(data_files=["gs://bucket/docs.jsonl"])
    beam_options = f"{GOOGLE} --dry_run=true"
    config = PrepareConfig("tokenizer", "gs://bucket/shards", runner="DataflowRunner", beam_options=beam_options)
    options = check_beam(config, Corpus(corpus, {}, {}))
    work = split_work("gs://bucket/shards", corpus=corpus)
    docs = StoredFile("gs://bucket/docs.jsonl", 100)
    partitions = [NumberedPartition(number, "a", [ByteRange(docs, number, number + 1)]) for number in range(100)]
    with pytest.raises(RunFailedError, match="DataflowRunner ended in the state None"):
        list(work_with_beam(work, partitions, options))


def test_beam_that_is_not_installed(source, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    assert main(flags(source, tmp_path, "--runner", "DirectRunner")) == 2
    assert "python3 install.py --with beam" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
