"""Stage 1 pushes the files that it wrote, without what is their owner's."""

import json
from pathlib import Path

import pytest

from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256
from tests.fixtures.generated_text import generated_lines
from tests.fixtures.run_command import Run
from tests.servers.fixtures import HubHandle
from tokenizer_training.train_unigram import main

REPO = "alice/tokenizer"
FILES = [
    "report.json", "report.png", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "training.json",
    "word_starts.npy",
]  # fmt: skip


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "clients.txt"
    path.parent.mkdir()
    path.write_text("\n".join(generated_lines(400)), encoding="utf-8")
    return path


def arguments(corpus_file: Path, folder: Path, *more: str) -> list[str]:
    flags = ["--data-files", str(corpus_file), "--vocab-size", "400", "--num-workers", "1"]
    return [*flags, "--output-dir", str(folder), "--push-to-hub", REPO, *more]


def test_other_files_paths_and_excerpts_stay_on_this_machine(
    corpus_file: Path, tmp_path: Path, hub_here: HubHandle
) -> None:
    folder = tmp_path / "out"
    (folder / "more").mkdir(parents=True)
    for name in (".env", "notes.md", "private.txt", "more/tokenizer.json"):
        (folder / name).write_text("a secret", encoding="utf-8")
    assert main(arguments(corpus_file, folder)) == 0
    pushed = hub_here.files(REPO)
    assert sorted(pushed) == sorted([*FILES, ".gitattributes"])
    excerpts = [
        example["text"].encode()
        for example in json.loads((folder / "report.json").read_text(encoding="utf-8"))["examples"]
    ]
    assert excerpts
    for secret in (b"clients.txt", b"private", str(tmp_path).encode(), b"a secret", *excerpts):
        assert not [path for path, content in pushed.items() if secret in content]
    for path, content in pushed.items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(content)
    assert tokenizer_sha256(load_tokenizer(str(tmp_path / "copy"))) == tokenizer_sha256(load_tokenizer(str(folder)))

    assert main(arguments(corpus_file, folder, "--publish-details")) == 0
    assert {name: hub_here.files(REPO)[name] for name in FILES} == {
        name: (folder / name).read_bytes() for name in FILES
    }


def test_a_repository_of_others_is_refused_before_training(
    corpus_file: Path, tmp_path: Path, hub_here: HubHandle, run: Run
) -> None:
    hub_here.put(REPO, "tokenizer.json", b"somebody's")
    refused = run(main, *arguments(corpus_file, tmp_path / "out"))
    assert refused.status == 2
    assert f"{REPO} already contains files that this tool did not create (tokenizer.json)" in refused.error
    assert hub_here.files(REPO)["tokenizer.json"] == b"somebody's"
    assert not (tmp_path / "out").exists()
    assert main(arguments(corpus_file, tmp_path / "out", "--hub-revision", "unigram")) == 0
    assert set(FILES) <= set(hub_here.files(REPO, revision="unigram"))
