import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from train.runtime import tpu as chips
from train.runtime.tpu import CHIPS, chip_of, local_accelerator_type, num_replicas_of

# TensorCores of a replica, and multiply-add units of a core: matrix units times rows times columns.
MATRIX_UNITS = {"v2": 1, "v3": 2, "v4": 2 * 4, "v5e": 4, "v5p": 2 * 4, "v6e": 4 * 4}


@pytest.mark.parametrize(
    ("name", "generation", "num_replicas"),
    [
        ("v2-8", "v2", 8),
        ("v3-8", "v3", 8),
        ("v3-128", "v3", 128),
        ("v4-8", "v4", 4),
        ("v5litepod-8", "v5e", 8),
        ("v5e-8", "v5e", 8),
        ("v5p-8", "v5p", 4),
        ("v6e-8", "v6e", 8),
        ("TPU v5 lite", "v5e", None),
        ("TPU v5", "v5p", None),
        ("TPU v6 lite", "v6e", None),
        ("TPU v4", "v4", None),
    ],
)
def test_names_of_chips(name, generation, num_replicas):
    assert chip_of(name) is CHIPS[generation]
    assert num_replicas_of(name) == num_replicas


@pytest.mark.parametrize("name", [None, "", "cpu", "NVIDIA A100", "v1-8", "v9-8", "v3-", "v5litepod"])
def test_what_is_no_known_chip(name):
    assert (chip_of(name) is None) == (name != "v5litepod")


@pytest.mark.parametrize("generation", CHIPS)
def test_peak_is_clock_times_matrix_units(generation):
    chip = CHIPS[generation]
    flops_per_cycle = MATRIX_UNITS[generation] * 128 * 128 * 2
    assert chip.peak_flops_per_second == pytest.approx(flops_per_cycle * chip.clock_hertz, rel=0.01)
    assert 0.9 * chip.memory_bytes < chip.usable_memory_bytes < chip.memory_bytes


def test_the_vm_is_asked_for_its_accelerator(monkeypatch):
    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Metadata-Flavor"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"v5litepod-8\n")

        def log_message(self, *_):
            pass

    asked: list[str] = []
    monkeypatch.delenv(chips.ACCELERATOR_TYPE_VARIABLE, raising=False)
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        assert local_accelerator_type() == "v5litepod-8"
        assert asked == ["Google"]
    assert local_accelerator_type() is None  # nobody listens any more

    monkeypatch.setenv(chips.ACCELERATOR_TYPE_VARIABLE, "v3-8")
    assert local_accelerator_type() == "v3-8"
