"""The workers that TF_CONFIG names, and the TPUs."""

import json

import pytest

from mlm_common.errors import InputError
from train.checks.preflight.hlo_costs import INTERCONNECT_BYTES_PER_SECOND
from train.run_mlm import main
from train.runtime import machines as chips
from train.runtime.machines import CHIPS, Cluster, chip_of, local_accelerator_type, num_replicas_of, read_cluster

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
        ("{'cluster'", "Expecting property name"),
        ("[]", "received []"),
        (tf_config({"worker": WORKERS, "ps": ["a:1"]}, FIRST), "its jobs may only be chief, with one address, and"),
        (tf_config({"worker": "a:1"}, FIRST), "must be a different host:port"),
        (tf_config({"worker": ["a:1", "b"]}, FIRST), "must be a different host:port"),
        (tf_config({"worker": ["a:1", "a:1"]}, FIRST), "must be a different host:port"),
        (tf_config({"worker": WORKERS}, {"type": "worker", "index": 3}), "which has 3 worker; indices start at 0"),
        (tf_config({"worker": WORKERS}, {"type": "chief", "index": 0}), "KeyError('chief')"),
        (json.dumps({"cluster": {"worker": WORKERS}}), "KeyError('task')"),
    ],
)
def test_what_is_wrong_with_the_variable_is_said(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(InputError, match="TF_CONFIG must be like") as caught:
        read_cluster()
    assert message in str(caught.value)


POD = "--tpu-name pod --train-dataset gs://bucket/x"


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        ("", "{", "TF_CONFIG must be like"),
        ("--tpu-name local", tf_config({"worker": WORKERS}, FIRST), "--tpu-name must not be given with a TF_CONFIG"),
        ("--tpu-name pod", "", "--train-dataset must be in Cloud Storage (gs://BUCKET/NAME) for --tpu-name pod"),
        (f"{POD} --eval-dataset c", "", "--eval-dataset must be in Cl"),
        (POD, "", "--output-dir must be in Cloud Storage"),
        (
            "--tpu-name lokal",
            "",
            "--train-dataset must be in Cloud Storage (gs://BUCKET/NAME) for --tpu-name lokal, whose hosts read and "
            "write it; received nowhere. Did you mean --tpu-name local?",
        ),
    ],
)
def test_the_command_refuses_before_it_looks_at_the_shards(monkeypatch, run, flags, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    outcome = run(main, "--train-dataset", "nowhere", "--output-dir", "out", *flags.split())
    assert outcome.refusal.startswith(f"error: {message}")


# TensorCores of a replica, and multiply-add units of a core: matrix units times rows times columns.
MATRIX_UNITS = {"v2": 1, "v3": 2, "v4": 2 * 4, "v5e": 4, "v5p": 2 * 4, "v6e": 4 * 4}


@pytest.mark.parametrize(
    ("generation", "replicas_of"),
    [
        ("v2", {"v2-8": 8}),
        ("v3", {"v3-8": 8, "v3-128": 128}),
        ("v4", {"v4-8": 4, "TPU v4": None}),
        ("v5e", {"v5litepod-8": 8, "v5e-8": 8, "TPU v5 lite": None, "v5litepod": None}),
        ("v5p", {"v5p-8": 4, "TPU v5": None}),
        ("v6e", {"v6e-8": 8, "TPU v6 lite": None}),
    ],
)
def test_names_of_chips(generation, replicas_of):
    assert {name: num_replicas_of(name) for name in replicas_of} == replicas_of
    assert all(chip_of(name) is CHIPS[generation] for name in replicas_of)


def test_what_is_no_known_chip():
    assert not any(map(chip_of, (None, "", "cpu", "NVIDIA A100", "v1-8", "v9-8", "v3-")))


@pytest.mark.parametrize("generation", CHIPS)
def test_peak_is_clock_times_matrix_units(generation):
    chip = CHIPS[generation]
    flops_per_cycle = MATRIX_UNITS[generation] * 128 * 128 * 2
    assert chip.peak_flops_per_second == pytest.approx(flops_per_cycle * chip.clock_hertz, rel=0.01)
    assert 0.9 * chip.memory_bytes < chip.usable_memory_bytes < chip.memory_bytes


def test_the_vm_is_asked_for_its_accelerator(metadata, monkeypatch):
    monkeypatch.delenv(chips.ACCELERATOR_TYPE_VARIABLE, raising=False)
    metadata["instance/attributes/accelerator-type"] = "v5litepod-8\n"
    assert local_accelerator_type() == "v5litepod-8"
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")  # nobody listens
    assert local_accelerator_type() is None
    monkeypatch.setenv(chips.ACCELERATOR_TYPE_VARIABLE, "v3-8")
    assert local_accelerator_type() == "v3-8"


def test_published_figures_of_chips():
    """https://cloud.google.com/tpu/docs: memory in GB, and GB/s that a chip sends to its neighbours."""
    published = {
        "v2": (8, 248), "v3": (16, 328), "v4": (32, 300), "v5e": (16, 200), "v5p": (96, 600), "v6e": (32, 400),
    }  # fmt: skip
    gib_and_rates = {
        generation: (chip.memory_bytes / 2**30, INTERCONNECT_BYTES_PER_SECOND[generation] / 1e9)
        for generation, chip in CHIPS.items()
    }
    assert gib_and_rates == published
