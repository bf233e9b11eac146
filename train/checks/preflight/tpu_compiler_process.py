"""Compile a StableHLO module for a TPU, on a machine with or without a TPU. `tpu_compiler` starts it as a process.

    python tpu_compiler_process.py v5e:2x4 default 8 step.mlir FOLDER

The process writes FOLDER/result.json and, if the step compiles, FOLDER/compiled.hlo. The interpreter needs jax and
libtpu, but no module of this project. The process is separate because libtpu, which contains the compiler, clashes with
TensorFlow.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT_NAME = "result.json"
HLO_NAME = "compiled.hlo"
LARGEST_HOST = (2, 2, 1)  # a host's number of chips in each dimension, libtpu's default
MEMORY_FIELDS = ("argument", "output", "alias", "temp", "generated_code")


def host_bounds(topology: str) -> list[int]:
    """Return a host's number of chips in each dimension: libtpu's default, or fewer if the topology is smaller."""
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    return [min(most, size) for most, size in zip(LARGEST_HOST, (*sizes, 1), strict=False)]


def compile_module(topology: str, chip_config: str, num_replicas: int, module_path: Path) -> Any:
    """Compile the program of one replica.

    Raises:
        JaxRuntimeError: the program does not compile, or does not fit.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology,
        chips_per_host_bounds=host_bounds(topology),
        **({} if chip_config == "default" else {"chip_config_name": chip_config}),
    )
    devices = tuple(description.devices[:num_replicas])
    options = compiler.get_compile_options(
        num_replicas=num_replicas,
        num_partitions=1,
        device_assignment=np.array([[device.id] for device in devices]),  # (replicas, partitions)
    )
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(module_path.read_text(encoding="utf-8"))
        # `backend_compile_and_load` passes the module in the form that this version of jax needs; older ones need
        # bytes.
        client = devices[0].client
        return compiler.backend_compile_and_load(client, module, xla_client.DeviceList(devices), options, ())


def main(topology: str, chip_config: str, num_replicas: str, module_path: str, folder: str) -> None:
    from jax.errors import JaxRuntimeError

    result: dict[str, Any] = {"versions": {name: version(name) for name in ("jax", "libtpu")}}
    try:
        executable = compile_module(topology, chip_config, int(num_replicas), Path(module_path))
    except JaxRuntimeError as error:
        result["error"] = str(error)
    else:
        memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
        result |= {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in MEMORY_FIELDS}
        result["peak_bytes"] = getattr(memory, "peak_memory_in_bytes", None)  # jax 0.6 does not report it
        result |= {"num_flops": cost["flops"], "num_bytes_accessed": cost["bytes accessed"]}
        Path(folder, HLO_NAME).write_text(executable.hlo_modules()[0].to_string(), encoding="utf-8")
    Path(folder, RESULT_NAME).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
