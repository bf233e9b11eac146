import json

import pytest

from mlm_common.errors import InputError
from train.run_mlm import main
from train.runtime.cluster import Cluster, read_cluster

WORKERS = ["10.0.0.1:2222", "10.0.0.2:2222", "[fe80::1]:2222"]


def tf_config(cluster, task):
    return json.dumps({"cluster": cluster, "task": task})


def test_without_the_variable_a_process_trains_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert read_cluster() == Cluster()
    assert read_cluster().is_chief
    for text in ("", "{}", tf_config({}, {}), tf_config({"chief": ["host:1"]}, {"type": "chief", "index": 0})):
        monkeypatch.setenv("TF_CONFIG", text)
        assert read_cluster() == Cluster()


@pytest.mark.parametrize(
    ("jobs", "task", "index"),
    [
        ({"worker": WORKERS}, {"type": "worker", "index": 0}, 0),
        ({"worker": WORKERS}, {"type": "worker", "index": "2"}, 2),
        ({"chief": WORKERS[:1], "worker": WORKERS[1:]}, {"type": "chief", "index": 0}, 0),
        ({"worker": WORKERS[1:], "chief": WORKERS[:1]}, {"type": "worker", "index": 1}, 2),
    ],
)
def test_the_chief_is_the_first_worker(monkeypatch, jobs, task, index):
    monkeypatch.setenv("TF_CONFIG", tf_config(jobs, task))
    cluster = read_cluster()
    assert cluster == Cluster(tuple(WORKERS), index)
    assert (cluster.num_workers, cluster.is_chief) == (3, index == 0)


FIRST = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'cluster'", "not JSON"),
        (tf_config({"worker": WORKERS, "ps": ["a:1"]}, FIRST), "the jobs chief and worker only"),
        (tf_config(["a:1"], FIRST), "the jobs chief and worker only"),
        (tf_config({"worker": "a:1"}, FIRST), "worker must be a list"),
        (tf_config({"worker": ["a:1", 5]}, FIRST), "worker must be a list"),
        (tf_config({"chief": ["a:1", "b:1"], "worker": WORKERS}, FIRST), "there can be one chief"),
        (tf_config({"worker": ["a:1", "b"]}, FIRST), "must be host:port; received 'b'"),
        (tf_config({"worker": ["a:1", "a:1"]}, FIRST), "must differ"),
        (tf_config({"worker": WORKERS}, {"type": "worker", "index": 3}), "which has 3 worker; received"),
        (tf_config({"worker": WORKERS}, {"type": "worker", "index": -1}), "its task must be one of its cluster"),
        (tf_config({"worker": WORKERS}, {"type": "chief", "index": 0}), "its task must be one of its cluster"),
        (json.dumps({"cluster": {"worker": WORKERS}}), "received null"),
    ],
)
def test_what_is_wrong_with_the_variable_is_said(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(InputError, match="TF_CONFIG must be like") as caught:
        read_cluster()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        ([], "{", "TF_CONFIG must be like"),
        (
            ["--tpu-name", "local"],
            tf_config({"worker": WORKERS}, FIRST),
            "--tpu-name must not be given with a TF_CONFIG",
        ),
        (["--tpu-name", "pod"], "", "--train-dataset must be in Cloud Storage (gs://BUCKET/NAME) for --tpu-name pod"),
        (
            ["--tpu-name", "pod", "--train-dataset", "gs://bucket/x", "--eval-dataset", "c"],
            "",
            "--eval-dataset must be in Cl",
        ),
        (["--tpu-name", "pod", "--train-dataset", "gs://bucket/x"], "", "--output-dir must be in Cloud Storage"),
    ],
)
def test_the_command_refuses_before_it_looks_at_the_shards(monkeypatch, capsys, flags, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    assert main(["--train-dataset", "nowhere", "--output-dir", "out", *flags]) == 2
    assert f"error: {message}" in capsys.readouterr().err
