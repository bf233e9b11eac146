"""Settings and fixtures of all tests: two logical CPU devices and the servers on loopback."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# JAX reads them when it is imported. The replicas of a test are the first of its devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Containers often forbid bytecode; then each of the many processes started here compiles TensorFlow's modules, in 8 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import HealthCheck, settings

import train

pytest_plugins = [
    "tests.fixtures.google_checkpoints",
    "tests.servers.fixtures",
    "tests.fixtures.other_environments",
    "tests.fixtures.run_command",
    "tests.fixtures.tiny_run",
    "tests.fixtures.fake_tpus",
    "tests.fixtures.jax_devices",
    "tests.fixtures.tiny_pairs",
    "tests.fixtures.tiny_classification",
    "tests.fixtures.finetuned_runs",
    "tests.fixtures.tiny_phases",
    "tests.fixtures.tiny_mixture",
    "tests.fixtures.tiny_texts",
    "tests.fixtures.tiny_choices",
    "tests.fixtures.users",
    "tests.fixtures.fuzzed_commands",
]

# Examples follow from a test's code alone, and time plays no part: whether a test passes depends on neither chance nor
# load. `pytest --hypothesis-profile explore` draws new examples.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile("repeatable")

# Files that take longest, the longest first: a process that begins one at the end keeps all others waiting.
FIRST = (
    *("test_tpu_preflight_compiler.py", "test_notebooks.py", "test_faults.py", "test_kills.py", "test_two_workers.py"),
    *("test_phases.py", "test_install.py", "test_sharded_resume.py", "test_benchmarks.py"),
    *("test_tpu_vm_environment.py", "test_computation_of_a_run.py", "test_other_environments.py"),
    *("test_resume.py", "test_run_mlm.py", "test_train_step.py"),
)

# What `make test-legacy` runs with transformers 4: what needs its TensorFlow classes, and what differs there.
LEGACY_LIST = Path(__file__).parent / "legacy_tests.txt"
LEGACY_TESTS = tuple(LEGACY_LIST.read_text(encoding="utf-8").split())

# What a shell starts in the background ignores Ctrl-C, and hands that on to all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--num-kills", type=int, default=3, help="kills of each stage")
    parser.addoption("--write-golden", action="store_true", help="write tests/golden/golden.json again")
    parser.addoption("--campaign-report", help="file that gets what the campaign has seen, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Set up TensorFlow, unless this process only hands out the tests to those of pytest-xdist."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        return
    sys.dont_write_bytecode = False
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
    if config.option.markexpr != "tpu":
        # What is compiled runs once or twice: what LLVM would save is less than what it takes.
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
    gc.disable()  # until all is imported, which makes a million objects that stay
    train.load_tensorflow()
    import tensorflow as tf

    # Before any test module makes a tensor. A single device is taken by name where one replica is meant.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped without TensorFlow classes, unless `make test-legacy` runs it with them."""
    from tests.fixtures.tiny_models import WITHOUT_TF_CLASSES

    report = yield
    if report.skipped and WITHOUT_TF_CLASSES in str(report.longrepr) and not item.nodeid.startswith(LEGACY_TESTS):
        report.outcome = "failed"
        report.longrepr = f"{WITHOUT_TF_CLASSES}, and no environment runs this test: add it to {LEGACY_LIST.name}."
    return report


def pytest_collection_finish() -> None:
    """Spare the collector of garbage all that was imported."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(autouse=True)
def _float32_again():
    """A run in bfloat16 sets the policy of its whole process."""
    yield
    import tf_keras

    tf_keras.mixed_precision.set_global_policy("float32")
