"""Settings and fixtures of all tests: two logical CPU devices and the servers on loopback."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import train  # noqa: F401  (before TensorFlow)

import tensorflow as tf  # isort: skip
import tf_keras

pytest_plugins = ["tests.servers.fixtures", "tests.fixtures.other_environments", "tests.fixtures.tiny_run"]

# Files that take longest, of which a process that begins one at the end keeps all others waiting.
FIRST = ("test_resume.py", "test_run_mlm.py", "test_train_step.py")

# What a shell starts in the background ignores Ctrl-C, and hands that on to all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before any test module makes a tensor. A single device is taken by name where one replica is meant.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(autouse=True)
def _float32_again():
    """A run in bfloat16 sets the policy of its whole process."""
    yield
    tf_keras.mixed_precision.set_global_policy("float32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)
