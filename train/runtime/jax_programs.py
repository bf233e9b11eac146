"""Compile StableHLO and execute it with JAX's client of the device (PJRT), one replica on each device.

This module does not import TensorFlow. All uses of JAX's private API are in this module; they were tested with JAX
0.6.2, 0.7.1, 0.10.2, 0.11.2 and 0.12.0.
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

# JAX's variable for the folder of compiled programs; if the variable is not set, the programs are in the user's cache.
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHE_FOLDER = Path("~/.cache/mlm-pretraining/programs")
# In a program's header: a result that is written into the memory of a parameter.
ALIAS = re.compile(r"parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>")

# One value per replica, on its device. For JAX this is a replicated array, in which all values are equal. Replicas
# have different batches and different shards of moments, so only the programs of this module may read those.
Replicas: TypeAlias = jax.Array


@dataclass
class Program:
    """A compiled program.

    Attributes:
        executable: JAX's executable.
        assigned: {index of a result: index of the parameter that it replaces}. The result takes over that parameter's
            memory.
        sharding: the sharding of `Replicas` on the devices.
    """

    executable: Any
    assigned: dict[int, int]
    sharding: NamedSharding
    _joiners: list[Any] = field(default_factory=list)  # a joiner for each result, created with the first results

    def execute(self, parameters: Sequence[Replicas]) -> list[Replicas]:
        """Start the program on all devices of this host; return before they have finished."""
        results = self.executable.execute_sharded(parameters)
        if self._joiners:
            return list(results.consume_with_handlers(self._joiners))
        values = results.disassemble_into_single_device_arrays()
        self._joiners = [_joiner(array.shape, array.dtype, self.sharding) for array, *_ in values]
        return [joined(device_values, self.sharding) for device_values in values]


def set_up_jax() -> None:
    """Configure JAX before it looks for devices: 64-bit integers (for the step counter), and a cache of programs."""
    jax.config.update("jax_enable_x64", True)
    logger = logging.getLogger("jax")
    logger.handlers.clear()  # the root logger prints JAX's messages like all other messages
    logger.setLevel(logging.WARNING)
    if find_spec("libtpu") and not (has_accelerator() or os.environ.get("JAX_PLATFORMS")):
        jax.config.update("jax_platforms", "cpu")  # otherwise libtpu searches for a TPU for seconds and prints errors
    if not os.environ.get(CACHE_VARIABLE):
        jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER.expanduser()))


def compile_program(stablehlo: str, devices: Sequence[Any]) -> Program:
    """Compile a program for replicas on these devices (of all hosts), or load it from JAX's cache."""
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
    """Yield a program as an MLIR module. The module is valid only inside the `with` block.

    TensorFlow repeats a constant at each use (ModernBERT's rotations hundreds of times). Remove the duplicates.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir, passmanager

    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
        yield module


def assigned(stablehlo: str) -> dict[int, int]:
    """Return the results that overwrite parameters: the new values of variables that the program assigns.

    Returns:
        {index of the result: index of the parameter}.
    """
    header = stablehlo[: stablehlo.index("func.func")]
    return {int(result or 0): int(parameter) for parameter, result in ALIAS.findall(header)}


def sharding_over(devices: Sequence[Any]) -> NamedSharding:
    """Return the sharding of `Replicas` on these devices (of all hosts)."""
    return NamedSharding(Mesh(np.array(devices), ("replicas",)), PartitionSpec())


def place(parts: Sequence[NDArray[Any]], sharding: NamedSharding, *, assigned: bool = False) -> Replicas:
    """Start copying one array to each device of this host, in a fifth of the time that `jax.device_put` takes.

    Args:
        parts: the array of each device.
        sharding: the sharding of the result.
        assigned: whether a program will write into the memory. If so, arrays are copied even on a CPU. Otherwise JAX
            would share and keep the NumPy array's memory, and copy it when the program starts.
    """
    aval, devices = ShapedArray(parts[0].shape, parts[0].dtype), sharding.mesh.local_devices
    copied = assigned and devices[0].platform == "cpu"

    def put(part: NDArray[Any], device: Any) -> jax.Array:  # one device per call: several would all get the first array
        return xla_client.batched_device_put(aval, SingleDeviceSharding(device), [part], [device], True, copied)

    return joined([put(part, device) for part, device in zip(parts, devices, strict=True)], sharding)


def joined(values: Sequence[jax.Array], sharding: NamedSharding) -> Replicas:
    """Join the values on this host's devices into `Replicas`, without copying."""
    replicas: Replicas = _joiner(values[0].shape, values[0].dtype, sharding)(values)
    return replicas


@functools.cache
def _joiner(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Return a function that joins arrays; `jax.make_array_from_single_device_arrays` is too slow for a whole state."""
    return pxla.global_aval_to_result_handler(ShapedArray(shape, dtype), sharding, committed=True)


def values_of(replicas: Replicas) -> list[jax.Array]:
    """Return the values on this host's devices, in order."""
    return [shard.data for shard in replicas.addressable_shards]


def host_copy(array: jax.Array) -> NDArray[Any]:
    """Copy the value on one device to the host, and wait for it. The next step may reuse the device's memory."""
    # Make a new array object, because the original object would keep the host's copy in memory.
    fresh = _joiner(array.shape, array.dtype, array.sharding)([array])
    return np.array(fresh)
