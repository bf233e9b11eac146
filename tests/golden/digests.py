"""Digests of what the stages write, without what differs between machines: paths, versions, clocks."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import tensorflow as tf
from safetensors import safe_open

from tests.fixtures.same_run import newest_variables, timeless_lines
from train.model.configurations import make_config, settings_of

# Keys of JSON files that tell of the machine.
OF_THE_MACHINE = {"versions", "commit", "transformers_version", "path", "data_files", "validation_files"}
# Files of an export that tell of the machine, or of the versions of other programs.
NOT_COMPARED = {"README.md", "loss.png", "report.png", "confusion_matrix.png"}
# Those that decide about a product's kernel, best first.
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")


def machine() -> str:
    """Describe what the bits of a result depend on: the same code gives the same bits on the same machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    # Processors of one name differ in their instructions, and a product's kernel is chosen by them.
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    best = next((name for name in INSTRUCTIONS if name in flags), "other")
    return f"TensorFlow {tf.__version__}, {len(os.sched_getaffinity(0))} cores, {', '.join(models)}, {best}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digests_of_folder(folder: Path) -> dict[str, str]:
    """Return {name of a file: digest}; JSON without the keys of the machine."""
    return {
        str(path.relative_to(folder)): digest(_portable(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in NOT_COMPARED and "runs" not in path.relative_to(folder).parts
    }


def digests_of_run(folder: Path) -> dict[str, Any]:
    """Return what a run leaves: `log` without clocks; `layout`, names, shapes, types; `bits`, digests by machine."""
    lines = timeless_lines(folder)
    name, variables = newest_variables(folder)
    record = json.loads((folder / "checkpoints" / name.replace("safetensors", "json")).read_text(encoding="utf-8"))
    exported = digests_of_folder(folder / "export")
    bits = {
        "log": digest(json.dumps(lines).encode()),
        "checkpoint": digest(variables),
        "export": exported.pop("model.safetensors"),
    }
    layout = {
        "checkpoint": _layout(folder / "checkpoints" / name),
        "export": _layout(folder / "export" / "model.safetensors"),
        # That of fine-tuning has the path of the model to start from.
        "fingerprint": None if record["settings"]["model"]["init_from"] else record["fingerprint_sha256"][:16],
        **exported,
    }
    return {"log": lines, "layout": layout, "bits": {machine(): bits}}


def _layout(path: Path) -> str:
    with safe_open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        listed = [(name, tensor.get_dtype(), tensor.get_shape()) for name, tensor in sorted(slices.items())]
    return digest(json.dumps(listed).encode())


def _portable(path: Path) -> bytes:
    if path.suffix != ".json":
        return path.read_bytes()
    content = _without_machine(json.loads(path.read_text(encoding="utf-8")))
    if path.name in AS_READ:
        content = dict(sorted(AS_READ[path.name](content).items()))
    return json.dumps(content).encode()


def _config(content: dict[str, Any]) -> dict[str, Any]:
    return settings_of(make_config(content)) if "model_type" in content else content


def _tokenizer_config(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in IN_TOKENIZER_JSON}


def _special_tokens(content: dict[str, Any]) -> dict[str, Any]:
    return {name: token["content"] if isinstance(token, dict) else token for name, token in content.items() if token}


# What transformers 4 and 5 write in other words, and read alike.
AS_READ = {
    "config.json": _config,
    "tokenizer_config.json": _tokenizer_config,
    "special_tokens_map.json": _special_tokens,
}
IN_TOKENIZER_JSON = ("added_tokens_decoder", "extra_special_tokens")


def _without_machine(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _without_machine(value) for name, value in tree.items() if name not in OF_THE_MACHINE}
    return [_without_machine(value) for value in tree] if isinstance(tree, list) else tree
