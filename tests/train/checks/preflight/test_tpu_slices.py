import math

import pytest

from mlm_common.errors import InputError
from train.checks.preflight.tpu_compiler_process import host_bounds
from train.checks.preflight.tpu_slices import SIZES, tpu_slice


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
        ("v5e-4", 4, 4, "v5e:2x2", "default"),
        ("v5litepod-8", 8, 8, "v5e:2x4", "default"),
        ("v5e-256", 256, 256, "v5e:16x16", "default"),
        ("v6e-1", 1, 1, "v6e:1x1", "default"),
        ("v6e-4", 4, 4, "v6e:2x2", "default"),
        ("v6e-8", 8, 8, "v6e:2x4", "default"),
    ],
)
def test_slices_as_strategy_and_compiler_see_them(name, num_chips, num_replicas, compiler_name, chip_config):
    found = tpu_slice(name)
    assert (found.num_chips, found.num_replicas) == (num_chips, num_replicas)
    assert (found.compiler_name, found.chip_config) == (compiler_name, chip_config)


@pytest.mark.parametrize("generation", SIZES)
def test_every_slice_is_known(generation):
    for size in SIZES[generation]:
        found = tpu_slice(f"{generation}-{size}")
        sides = [int(side) for side in found.compiler_name.partition(":")[2].split("x")]
        assert math.prod(sides) == found.num_chips
        assert found.num_replicas == size // (2 if generation in ("v4", "v5p") else 1)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v5e-2", "v5e-4"),
        ("v2-4", "v2-8"),
        ("v3-1", "v3-8"),
        ("v3-12", "v3-8"),
        ("v5e-6", "v5e-8"),
        ("v5litepod-512", "v5e-256"),
        ("v6e", "v6e-8"),
        ("v5e8", "v5e-8"),
        ("v6e-0", "v6e-8"),
        ("v1-8", r"v\d-8"),
        ("h100-8", "v5e-8"),
        ("", "v5e-8"),
    ],
)
def test_a_mistyped_slice_gets_the_nearest_and_the_list(name, nearest):
    with pytest.raises(InputError, match=rf"no TPU slice {name}; did you mean {nearest}\?.* v5e-1/4/8/16/.*, v6e-1"):
        tpu_slice(name)


@pytest.mark.parametrize(
    ("topology", "bounds"),
    [("v5e:1x1", [1, 1, 1]), ("v5e:2x2", [2, 2, 1]), ("v5e:2x4", [2, 2, 1]), ("v4:2x2x2", [2, 2, 1])],
)
def test_a_host_has_at_most_the_chips_of_its_slice(topology, bounds):
    assert host_bounds(topology) == bounds
