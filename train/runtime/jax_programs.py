"""StableHLO compiled and executed by JAX's client of the device (PJRT), as one replica on each device.

TensorFlow is not imported here. All that is private to JAX is in this module, which was checked with JAX 0.6.2, 0.7.1,
0.10.2, 0.11.2 and 0.12.0.
"""

import functools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src.core import ShapedArray
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from train import has_accelerator

# JAX's own variable for it; without it the programs are kept in the user's cache.
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHE_FOLDER = Path("~/.cache/mlm-pretraining/programs")
# Of a program's header: a result that is written in the memory of a parameter.
ALIAS = re.compile(r"parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>")

# A value of each replica, on its device: JAX's array on all devices, under the sharding that calls them equal. Those of
# a batch are not, nor are shards of moments; nothing but a program of this module reads them.
Replicas: TypeAlias = jax.Array


@dataclass
class Program:
    """A compiled program.

    assigned: {number of a result: number of the parameter that it replaces}; that parameter's memory is used up.
    """

    executable: Any
    assigned: dict[int, int]
    sharding: NamedSharding
    _joiners: list[Any] = field(default_factory=list)  # of the results, known when there are some

    def execute(self, parameters: Sequence[Replicas]) -> list[Replicas]:
        """Start the program on all devices of this host; returns before they have finished."""
        results = self.executable.execute_sharded(parameters)
        if self._joiners:
            return list(results.consume_with_handlers(self._joiners))
        values = results.disassemble_into_single_device_arrays()
        self._joiners = [_joiner(one.shape, one.dtype, self.sharding) for one, *_ in values]
        return [joined(of_devices, self.sharding) for of_devices in values]


def set_up_jax() -> None:
    """Let JAX keep 64-bit integers, as steps are counted in, and what it compiles; before it looks for devices."""
    jax.config.update("jax_enable_x64", True)
    logger = logging.getLogger("jax")
    logger.handlers.clear()  # what it says is printed as all else
    logger.setLevel(logging.WARNING)
    if find_spec("libtpu") and not (has_accelerator() or os.environ.get("JAX_PLATFORMS")):
        jax.config.update("jax_platforms", "cpu")  # else libtpu looks for a TPU for seconds, and prints errors
    if not os.environ.get(CACHE_VARIABLE):
        jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER.expanduser()))


def compile_program(stablehlo: str, devices: Sequence[Any]) -> Program:
    """Compile a program for replicas on these devices, of all hosts; or find it compiled in JAX's cache."""
    from jax._src import compiler

    assignment = np.array([[device.id] for device in devices])  # (replicas, partitions)
    client = devices[0].client
    options = compiler.get_compile_options(len(devices), 1, device_assignment=assignment, backend=client)
    with parsed(stablehlo) as module:
        executable = compiler.compile_or_get_cached(
            client,
            module,
            np.array(devices),
            options,
            (),
            xla_client.DeviceList(tuple(devices)),
        )
    return Program(executable, assigned(stablehlo), sharding_over(devices))


@contextmanager
def parsed(stablehlo: str) -> Iterator[Any]:
    """Parse a program, a module of MLIR within the context.

    TensorFlow writes a constant again wherever it is used, ModernBERT's rotations hundreds of times: one is left.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir, passmanager

    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
        yield module


def assigned(stablehlo: str) -> dict[int, int]:
    """Find the results that are written in the memory of parameters: variables that the program assigns."""
    header = stablehlo[: stablehlo.index("func.func")]
    return {int(result or 0): int(parameter) for parameter, result in ALIAS.findall(header)}


def sharding_over(devices: Sequence[Any]) -> NamedSharding:
    """Make the sharding of `Replicas` on these devices, of all hosts."""
    return NamedSharding(Mesh(np.array(devices), ("replicas",)), PartitionSpec())


def place(parts: Sequence[NDArray[Any]], sharding: NamedSharding, *, assigned: bool = False) -> Replicas:
    """Begin to copy one array to each device of this host; in a fifth of the time of `jax.device_put`.

    assigned: a program writes into their memory. On a CPU, JAX would else use that of an array, keep it, and copy it
    when the program starts.
    """
    aval, devices = ShapedArray(parts[0].shape, parts[0].dtype), sharding.mesh.local_devices
    copied = assigned and devices[0].platform == "cpu"

    def put(part: NDArray[Any], device: Any) -> jax.Array:  # to several devices it would put the first
        return xla_client.batched_device_put(aval, SingleDeviceSharding(device), [part], [device], True, copied)

    return joined([put(part, device) for part, device in zip(parts, devices, strict=True)], sharding)


def joined(values: Sequence[jax.Array], sharding: NamedSharding) -> Replicas:
    """Take the values on this host's devices for those of its replicas."""
    replicas: Replicas = _joiner(values[0].shape, values[0].dtype, sharding)(values)
    return replicas


@functools.cache
def _joiner(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Make what joins arrays; for as many as a state has, `jax.make_array_from_single_device_arrays` is too slow."""
    return pxla.global_aval_to_result_handler(ShapedArray(shape, dtype), sharding, committed=True)


def values_of(replicas: Replicas) -> list[jax.Array]:
    """Return the values on this host's devices, in their order."""
    return [shard.data for shard in replicas.addressable_shards]


def host_copy(array: jax.Array) -> NDArray[Any]:
    """Copy a value of one device; waits for it. The next step may reuse the device's memory."""
    fresh = _joiner(array.shape, array.dtype, array.sharding)([array])  # JAX's array keeps what it was copied to
    return np.array(fresh)
