"""What is private to other libraries is used in few modules, and is still there: a test names what went missing."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
FILES = sorted(
    path
    for package in ("mlm_common", "tokenizer_training", "tfrecord_prep", "train", "finetuning", "recipes")
    for path in (PROJECT / package).rglob("*.py")
)
PRIVATE = ("jax._src", "tensorflow.python", "tensorflow.compiler", "tf_keras.src")
# Bindings of operations, which every TensorFlow generates, are used wherever they are needed.
BINDINGS = "tensorflow.compiler.tf2xla"
MODULES = {
    "jax": {"train/runtime/jax_programs.py", "train/checks/preflight/tpu_compiler_process.py"},
    "tensorflow": {"train/runtime/private.py"},
    "tf_keras": {"train/runtime/private.py"},
}


def private_names(path: Path) -> Iterator[str]:
    """Find what a file imports of private modules, and which of their attributes it uses."""
    imported = {}
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE):
            for name in node.names:
                imported[name.asname or name.name] = f"{node.module}.{name.name}"
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            yield f"{imported[node.value.id]}.{node.attr}"


USED = {str(path.relative_to(PROJECT)): sorted({*private_names(path)}) for path in FILES}


def is_there(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute) or bool(importlib.util.find_spec(name))
    except ModuleNotFoundError:
        return bool(module.count(".")) and is_there(module) and hasattr(value_of(module), attribute)


def value_of(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", sorted({name for names in USED.values() for name in names}))
def test_a_private_name_is_there(name):
    assert is_there(name), f"{name}, used in {', '.join(file for file, names in USED.items() if name in names)}"


def test_a_name_that_is_not_there_is_missed():
    assert is_there("tensorflow.python.profiler.trace.enabled")
    assert not is_there("tensorflow.python.profiler.trace.disabled")
    assert not is_there("tensorflow.python.profiler.traces")


def test_private_names_are_used_in_few_modules():
    modules: dict[str, set[str]] = {}
    for file, names in USED.items():
        for name in names:
            if not name.startswith(BINDINGS):
                modules.setdefault(name.partition(".")[0], set()).add(file)
    assert modules == MODULES


def test_tf_keras_counts_steps_by_the_variable_that_we_use():
    import tf_keras

    from train.runtime.private import steps_per_execution

    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile(steps_per_execution=3)
    assert steps_per_execution(model).numpy() == 3
