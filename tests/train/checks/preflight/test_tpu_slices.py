import pytest

from mlm_common.errors import InputError
from train.checks.preflight.tpu_slices import tpu_slice


@pytest.mark.parametrize(
    ("name", "num_chips", "num_replicas", "compiler_name", "chip_config"),
    [
        ("v2-8", 4, 8, "v2:2x2", "default"),
        ("v3-8", 4, 8, "v3:2x2", "default"),
        ("v3-32", 16, 32, "v3:4x4", "default"),
        ("v4-8", 4, 4, "v4:2x2x1", "megacore"),
        ("v4-16", 8, 8, "v4:2x2x2", "megacore"),
        ("v4-32", 16, 16, "v4:2x2x4", "megacore"),
        ("v4-64", 32, 32, "v4:2x4x4", "megacore"),
        ("v5p-8", 4, 4, "v5p:2x2x1", "default"),
        ("v5e-1", 1, 1, "v5e:1x1", "default"),
        ("v5litepod-8", 8, 8, "v5e:2x4", "default"),
        ("v5e-256", 256, 256, "v5e:16x16", "default"),
        ("v6e-8", 8, 8, "v6e:2x4", "default"),
    ],
)
def test_slices_as_strategy_and_compiler_see_them(name, num_chips, num_replicas, compiler_name, chip_config):
    found = tpu_slice(name)
    assert (found.num_chips, found.num_replicas) == (num_chips, num_replicas)
    assert (found.compiler_name, found.chip_config) == (compiler_name, chip_config)


@pytest.mark.parametrize("name", ["v5e", "v1-8", "h100-8", ""])
def test_unknown_slices_are_refused(name):
    with pytest.raises(InputError, match=r"--topology must be a TPU generation \(v2, .*\) and its size.* received"):
        tpu_slice(name)


@pytest.mark.parametrize("name", ["v3-1", "v3-12", "v5e-6", "v5e-0"])
def test_sizes_that_are_no_slice_are_refused(name):
    with pytest.raises(InputError, match=f"whole chips.* received {name}"):
        tpu_slice(name)
