"""Several sources: a folder of shards for each, without duplicates among them, and the file that lists them."""

import json
import random
import shutil
from pathlib import Path
from string import ascii_lowercase
from unicodedata import normalize

import pytest
from transformers import PreTrainedTokenizerFast

from mlm_common.mixture import MIXTURE_NAME, MixtureSource, read_mixture
from tests.fixtures.tiny_corpus import WORDS, contents, flags, read_rows
from tfrecord_prep import prepare_tfrecord_shards as command
from tfrecord_prep import split
from tfrecord_prep.manifest import read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main

NAMES = ("one", "two")
WIDE = {ord(letter): ord(letter) + 0xFEE0 for letter in ascii_lowercase}


def texts(number: int) -> list[str]:
    """Documents, some of them twice in one source or in both, also in wide letters and with more spaces."""
    draw = random.Random(number)
    shared = [" ".join(random.Random(index).choices(WORDS[:15], k=12)) for index in range(40)]
    fresh = [" ".join([WORDS[number], *draw.choices(WORDS[:15], k=12)]) for _ in range(80)]
    documents = [*fresh, *shared, *(text.translate(WIDE).replace(" ", "  ") for text in fresh[:9]), "", " "]
    draw.shuffle(documents)
    return documents


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of two sources, one with validation files of its own."""
    folder = tmp_path_factory.mktemp("sources")
    for number, name in enumerate(NAMES):
        (folder / f"{name}.txt").write_text("\n".join(texts(number)) + "\n", encoding="utf-8")
    held_out = [*texts(0)[:20], *texts(1)[:20], *texts(9)[:20]]
    (folder / "held.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    settings = {
        "one": {"data_files": [f"{folder}/one.txt"], "weight": 3, "validation_percent": 20},
        "two": {"data_files": [f"{folder}/two.txt"], "weight": 1, "validation_files": [f"{folder}/held.txt"]},
    }
    (folder / "sources.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return folder / "sources.yaml"


def mixed(source: Path, sources: Path, output: Path | str, *extra_flags: str) -> list[str]:
    return flags(source, output, *extra_flags, corpus=("--sources", str(sources)))


@pytest.fixture(scope="module")
def prepared(source: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "out"
    assert main(mixed(source, sources, output, "--drop-duplicates")) == 0
    return output


def documents_of(source: Path, folder: Path) -> list[str]:
    """Read the documents of a split from its shards, normalized as duplicates are."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source / "tokenizer")
    ids = [token for row in read_rows(folder) for token in row]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return [" ".join(document.removesuffix("[SEP]").split()) for document in text.split("[CLS]")[1:]]


def test_the_folder_of_each_source_is_that_of_a_corpus(source, sources, tmp_path):
    assert main(mixed(source, sources, tmp_path / "out")) == 0
    assert read_mixture(str(tmp_path / "out")) == {
        name: MixtureSource(f"{name}/train", f"{name}/validation", weight) for name, weight in (("one", 3), ("two", 1))
    }
    held_out = {"one": ["--validation-percent", "20"], "two": ["--validation-files", f"{sources.parent}/held.txt"]}
    for name, held_out_flags in held_out.items():
        files = ("--data-files", f"{sources.parent}/{name}.txt")
        assert main(flags(source, tmp_path / name, *held_out_flags, corpus=files)) == 0
        assert contents(tmp_path / name) == contents(tmp_path / "out" / name)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*NAMES, MIXTURE_NAME}


def test_each_text_is_kept_once_validation_first(source, sources, prepared):
    parts = [("one", "validation"), ("two", "validation"), ("one", "train"), ("two", "train")]
    kept = [text for part in parts for text in documents_of(source, prepared.joinpath(*part))]
    every = [
        text for name in NAMES for text in (sources.parent / f"{name}.txt").read_text(encoding="utf-8").split("\n")
    ]
    every += (sources.parent / "held.txt").read_text(encoding="utf-8").split("\n")
    assert len(kept) == len(set(kept)) == len({" ".join(normalize("NFKC", text).split()) for text in every} - {""})
    held_out = (sources.parent / "held.txt").read_text(encoding="utf-8").split("\n")
    in_validation = set(documents_of(source, prepared / "one" / "validation"))
    in_validation |= set(documents_of(source, prepared / "two" / "validation"))
    assert {" ".join(normalize("NFKC", text).split()) for text in held_out} - {""} <= in_validation
    manifests = [read_manifest(str(prepared.joinpath(*part))) for part in parts]
    num_documents = sum(
        manifest.totals.num_documents + manifest.totals.num_duplicate_documents for manifest in manifests
    )
    assert num_documents == len(every) - 3  # each file ends in a line break
    assert all(manifest.totals.num_duplicate_documents for manifest in manifests[1:])
    assert [list(manifest.deduplicated) for manifest in manifests] == [
        ["/".join(part) for part in parts[:number]] for number in (1, 2, 3, 4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner_flags",
    [
        ("--num-workers", "2"),
        ("--runner", "DirectRunner", "--beam-options=--direct_running_mode=in_memory --direct_num_workers=1"),
    ],
    ids=["two workers", "Beam"],
)
def test_others_write_the_same(source, sources, prepared, tmp_path, runner_flags, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # undone after the test: a pipeline in this process sets it
    assert main(mixed(source, sources, tmp_path / "out", "--drop-duplicates", *runner_flags)) == 0
    assert contents(tmp_path / "out") == contents(prepared)


@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_stopped_anywhere_it_continues_to_the_same_bytes(source, sources, prepared, tmp_path, place, monkeypatch):
    class Stop(BaseException):
        pass

    calls = 0

    def stopping(function):
        def call(*arguments, **settings):
            nonlocal calls
            calls += 1
            if calls == 7 * place + 1:
                raise Stop
            return function(*arguments, **settings)

        return call

    arguments = mixed(source, sources, tmp_path / "out", "--drop-duplicates")
    with monkeypatch.context() as patch:
        for module, name in ((split, "partition_sha256"), (split, "write_manifest"), (command, "write_mixture")):
            patch.setattr(module, name, stopping(getattr(module, name)))
        try:
            assert main(arguments) == 0
        except Stop:
            assert not (tmp_path / "out" / MIXTURE_NAME).exists()
        else:
            assert calls <= 7 * place
    assert main(arguments) == 0
    assert contents(tmp_path / "out") == contents(prepared)


def test_the_flag_and_the_sources_before_are_part_of_the_settings(source, sources, prepared, tmp_path, run):
    output = shutil.copytree(prepared, tmp_path / "out")
    assert "deduplicated" in run(main, *mixed(source, sources, output)).error
    settings = json.loads(sources.read_text(encoding="utf-8"))
    settings["two"]["data_files"] = [str(shutil.copy(sources.parent / "held.txt", tmp_path / "new.txt"))]
    del settings["two"]["validation_files"]
    changed = tmp_path / "sources.yaml"
    changed.write_text(json.dumps({"two": settings["two"], "one": settings["one"]}), encoding="utf-8")
    error = run(main, *mixed(source, changed, output, "--drop-duplicates")).error
    assert "contains shards with other settings: " in error
    assert contents(output) == contents(prepared)


def test_a_single_corpus_loses_its_duplicates_too(source, sources, tmp_path):
    files = ("--data-files", f"{sources.parent}/one.txt")
    assert main(flags(source, tmp_path, "--drop-duplicates", corpus=files)) == 0
    assert len(documents_of(source, tmp_path / "train")) == len(set(documents_of(source, tmp_path / "train"))) == 120
    assert read_manifest(str(tmp_path / "train")).totals.num_duplicate_documents == 9
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_verify_checks_all_sources(prepared, tmp_path, run):
    output = Path(shutil.copytree(prepared, tmp_path / "out"))
    verify = ["--verify", "--output-dir", output, "--num-workers", 1]
    shown = run(main, *verify)
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == [
        f"{output}/{name}/{split}" for name in NAMES for split in ("train", "validation")
    ]
    shutil.move(output / "two" / "validation", tmp_path / "away")
    assert f"{output} has no two/validation, which {MIXTURE_NAME} lists" in run(main, *verify).error
    (output / MIXTURE_NAME).unlink()
    assert f"{output} has no {MIXTURE_NAME}" in run(main, *verify).error


def test_a_single_corpus_does_not_go_into_a_mixture(source, prepared, run):
    assert "contains the shards of several sources" in run(main, *flags(source, prepared)).error


def test_a_mixture_is_pushed_and_listed_last(source, sources, tmp_path, hub_here):
    assert main(mixed(source, sources, tmp_path / "out", "--push-to-hub", "alice/rows")) == 0
    pushed = hub_here.files("alice/rows", kind="datasets").keys() - {".gitattributes", "README.md"}
    assert pushed == contents(tmp_path / "out").keys()
    assert hub_here.repository("alice/rows", kind="datasets")["commits"][-1] == "List the sources"
    assert "| two/validation |" in hub_here.files("alice/rows", kind="datasets")["README.md"].decode()


@pytest.mark.slow
def test_cloud_storage_holds_the_same_bytes(source, sources, prepared, cloud):
    """The hashes of documents, too, are there while they are needed, and not afterwards."""
    assert main(mixed(source, sources, f"{cloud.bucket_url}/run", "--drop-duplicates")) == 0
    assert cloud.objects() == {f"run/{name}": data for name, data in contents(prepared).items()}
