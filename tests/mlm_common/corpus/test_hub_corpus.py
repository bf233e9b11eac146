"""A data set of the Hub as a corpus, its splits as the corpus's, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from mlm_common.corpus import hub_dataset
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.hub.retries import HubAwayError
from tests.servers.fixtures import HubHandle

HUB_PROGRAM = """
import json, sys
from mlm_common.cli.command_line import InputError
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus, read_partition

answers = []
for settings in json.loads(sys.argv[1]):
    revision_as_well = settings.pop("revision_as_well", False)
    try:
        corpus = open_corpus(CorpusConfig(**settings))
        splits = [list(corpus.documents(split)) for split in corpus.split_names]
        for split, documents in zip(corpus.split_names, splits):
            partitions = list(corpus.partitions(split, 10))
            read = [list(read_partition(corpus.config, split, partition)) for partition in partitions]
            assert sum(read, []) == documents
        answer = splits[0] if len(splits) == 1 else splits
        answers.append([corpus.record["settings"]["dataset_revision"], answer] if revision_as_well else answer)
    except InputError as error:
        answers.append(f"InputError: {error}")
print(json.dumps(answers))
"""


def run_program(hub_server: HubHandle, cases: list[dict], **environment: str) -> list:
    program = subprocess.run(
        [sys.executable, "-c", HUB_PROGRAM, json.dumps(cases)],
        env=os.environ | hub_server.environment | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


def test_hub_data_set(hub_server):
    hub_server.put("alice/stories", "train.jsonl", b'{"text": "one"}\n{"text": null}\n{"text": "two"}\n', "datasets")
    hub_server.put("alice/stories", "validation.jsonl", b'{"text": "held out"}\n', "datasets")
    hub_server.put("alice/stories", "test.jsonl", b'{"text": "test one"}\n{"text": "test two"}\n', "datasets")
    name = {"dataset_name": "alice/stories"}
    cases: list[tuple[dict, list | str]] = [
        (name, ["one", "", "two"]),
        (name | {"streaming": True, "limit": 2}, ["one", ""]),
        (name | {"split": "validation"}, ["held out"]),
        (
            name | {"validation_split": "validation", "test_split": "test", "streaming": True},
            [["one", "", "two"], ["held out"], ["test one", "test two"]],
        ),
        (name | {"validation_split": "validation", "test_percent": 99.99}, [[], ["held out"], ["one", "", "two"]]),
        (name | {"split": "nosuch"}, "Unknown split"),
        (name | {"test_split": "nosuch"}, "--test-split nosuch"),
        (name | {"dataset_config": "nosuch"}, "'nosuch' not found"),
        (name | {"text_column": "body"}, "--text-column must name a column; alice/stories has text, not 'body'"),
        ({"dataset_name": "alice/missing"}, "alice/missing"),
    ]
    answers = run_program(hub_server, [settings for settings, _ in cases])
    for (settings, expected), answer in zip(cases, answers, strict=True):
        if isinstance(expected, str):
            assert str(answer).startswith("InputError"), settings
            assert expected in answer
        else:
            assert answer == expected, settings


def test_a_data_set_of_a_hub_that_is_away_may_be_tried_again(hub_here, monkeypatch):
    monkeypatch.setattr(hub_dataset, "RETRY_DELAYS_SECONDS", ())
    hub_here.fault("datasets", times=1000)
    with pytest.raises(HubAwayError, match=r"--dataset-name alice/stories .* cannot be loaded: .*503"):
        open_corpus(CorpusConfig(dataset_name="alice/stories"))


@pytest.mark.slow
def test_a_data_set_is_read_at_the_commit_that_is_recorded(hub_server):
    def put(*texts: str) -> str:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        hub_server.put("alice/grows", "train.jsonl", rows.encode(), "datasets")
        return hub_server.commit("alice/grows", "datasets")

    settings = [{"dataset_name": "alice/grows", "streaming": streaming} for streaming in (True, False)]
    first = put("one")
    assert run_program(hub_server, [case | {"revision_as_well": True} for case in settings]) == [[first, ["one"]]] * 2
    second = put("one", "two")
    cases = [case | {"dataset_revision": name} for name in (first, None, "main", second) for case in settings]
    answers = run_program(hub_server, [case | {"revision_as_well": True} for case in cases])
    assert answers == [[first, ["one"]]] * 2 + [[second, ["one", "two"]]] * 6
    # Without the Hub the commit fetched last is read, and no other in its place.
    other = "c" * 40
    case = {"dataset_name": "alice/grows", "revision_as_well": True}
    cases = [case | {"dataset_revision": revision} for revision in (None, second, "main", other)]
    answers = run_program(hub_server, cases, HF_HUB_OFFLINE="1")
    assert answers[:2] == [[second, ["one", "two"]]] * 2
    for name, answer in zip(("main", other), answers[2:], strict=True):
        assert f"at --dataset-revision {name} is not in the cache" in answer
        assert f"in the cache, which has {second}" in answer
