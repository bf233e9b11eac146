"""StableHLO compiled and executed by JAX's client of the device (PJRT), as one replica on each device.

TensorFlow is not imported here. All that is private to JAX is in `compile_program`; the same functions were there,
with the same arguments, in JAX 0.6.2, 0.7.1, 0.7.2 and 0.10.2.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

# JAX's own variable for it; without it the programs are kept in the user's cache.
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHE_FOLDER = Path("~/.cache/mlm-pretraining/programs")
# What compiles faster is not kept.
MIN_KEPT_COMPILE_SECONDS = 1.0
# Of a program's header: a result that is written in the memory of a parameter.
ALIAS = re.compile(r"parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>")

# A value of each of this host's replicas, on its device.
Replicas = list[jax.Array]


class Program(NamedTuple):
    """A compiled program.

    assigned: {number of a result: number of the parameter that it replaces}; that parameter's memory is used up.
    """

    executable: Any
    assigned: dict[int, int]

    def execute(self, parameters: Sequence[Replicas]) -> list[Replicas]:
        """Start the program on all devices of this host; returns before they have finished."""
        results = self.executable.execute_sharded(parameters).disassemble_into_single_device_arrays()
        return list(results)


def set_up_jax() -> None:
    """Let JAX keep 64-bit integers, as steps are counted in, and what it compiles."""
    jax.config.update("jax_enable_x64", True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    if not os.environ.get(CACHE_VARIABLE):
        jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER.expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_KEPT_COMPILE_SECONDS)


def compile_program(stablehlo: str, devices: Sequence[Any]) -> Program:
    """Compile a program for replicas on these devices, of all hosts; or find it compiled in JAX's cache."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    assignment = np.array([[device.id] for device in devices])  # (replicas, partitions)
    client = devices[0].client
    options = compiler.get_compile_options(len(devices), 1, device_assignment=assignment, backend=client)
    with mlir.make_ir_context():
        executable = compiler.compile_or_get_cached(
            client,
            ir.Module.parse(stablehlo),
            np.array(devices),
            options,
            (),
            xla_client.DeviceList(tuple(devices)),
        )
    return Program(executable, assigned(stablehlo))


def assigned(stablehlo: str) -> dict[int, int]:
    """Find the results that are written in the memory of parameters: variables that the program assigns."""
    header = stablehlo[: stablehlo.index("func.func")]
    return {int(result or 0): int(parameter) for parameter, result in ALIAS.findall(header)}


def place(parts: Sequence[NDArray[Any]], devices: Sequence[Any]) -> Replicas:
    """Begin to copy one array to each device."""
    placed: Replicas = jax.device_put(list(parts), list(devices))
    return placed


def host_copy(array: jax.Array) -> NDArray[Any]:
    """Copy a value of one device; waits for it. The next step may reuse the device's memory."""
    return np.array(array)
