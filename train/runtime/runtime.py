"""`Runtime`: the interface to the devices that a run computes on.

`TensorFlowRuntime` uses a strategy of `tf.distribute`. With `JaxRuntime`, TensorFlow only lowers the steps, and
JAX executes them. Code outside this folder does not depend on which runtime is used.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from train.runtime.machines import Cluster

# Key of the seconds that a train function waited for input, in the dictionary that it returns.
WAIT_NAME = "input_wait_seconds"


class StoredVariable(Protocol):
    """A variable that is read and set as a single array, even if it is divided among the replicas."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def numpy(self) -> NDArray[Any]: ...

    def assign(self, value: Any) -> Any: ...


class Runtime(ABC):
    """The devices of a run, with one replica of the model on each.

    Attributes:
        cluster: the processes of the run, one per host.
        num_replicas: number of replicas on all hosts together; every host has the same number.
    """

    cluster: Cluster
    num_replicas: int

    @property
    def num_local_replicas(self) -> int:
        return self.num_replicas // self.cluster.num_workers

    @abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which a model and its optimizer are built."""

    @abstractmethod
    def distribute(self, batches: Callable[[Any], Any]) -> Iterable[Any]:
        """Return the data set of the batches of this host's replicas.

        The data set declares infinite cardinality, so the caller must count the batches.

        Args:
            batches: returns the batches of one input pipeline, given a `tf.distribute.InputContext`.
        """

    @abstractmethod
    def deal(self, array_of: Callable[[int], NDArray[Any]]) -> Any:
        """Give replica i of this host the array `array_of(i)`. All arrays must have the same shape."""

    @abstractmethod
    def on_replicas(self, function: Callable[..., Any], *, jit_compile: bool) -> Callable[..., Any]:
        """Turn a function of one replica's part of a batch into a function of whole batches.

        A program is compiled for each shape of the batches.

        Returns:
            A function that returns the results of this host's replicas: for each tensor a sequence of values, one per
            replica, that NumPy can read.
        """

    @abstractmethod
    def train_function(self, model: Any) -> Callable[[Iterator[Any]], dict[str, Any]]:
        """Return the function that Keras' `fit` calls, with an iterator of batches, for each execution.

        The function runs `model.train_step`, and returns {`WAIT_NAME`: seconds in which no batch was ready}.
        """

    @abstractmethod
    def variable(self, variable: Any, axis: int | None = None) -> StoredVariable:
        """Wrap a variable, so that it can be saved to checkpoints and restored.

        If `axis` is given, the variable is divided among the replicas along this axis.
        """

    @abstractmethod
    def read(self, variables: Sequence[Any]) -> list[NDArray[Any]]:
        """Read variables that are equal on all replicas. Wait for the device."""

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[NDArray[Any]]) -> None:
        """Set variables to the same value on all replicas."""

    # With TensorFlow's runtime the following methods do nothing, because its variables are on the devices already.

    def pull(self, variables: Iterable[Any]) -> None:  # noqa: B027
        """Copy values from the devices to TensorFlow's variables. Waits for the device."""

    def push(self, variables: Iterable[Any]) -> None:  # noqa: B027
        """Copy the values of TensorFlow's variables to the devices."""

    @contextmanager
    def on_host(self, variables: Sequence[Any]) -> Iterator[None]:
        """Within the context, copy the values from the devices to TensorFlow's variables, for code that reads them."""
        del variables
        yield

    @abstractmethod
    def wait(self, variable: Any) -> None:
        """Wait for all steps so far; `variable` must be one that each step sets."""

    @abstractmethod
    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays that all hosts passed, (hosts, …). Wait for the other hosts."""

    @abstractmethod
    def start_profile(self, folder: str) -> None:
        """Start a trace of host and device for TensorBoard."""

    @abstractmethod
    def stop_profile(self) -> None:
        """End the trace and write its files."""

    def release(self) -> None:  # noqa: B027
        """Free the variables of models that are no longer used."""


def max_over_workers(runtime: Runtime, values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all workers, once all workers have called this."""
    return list(runtime.gather(np.asarray(values, np.float32)).max(axis=0).tolist())


def wait_for_workers(runtime: Runtime) -> None:
    if runtime.cluster.num_workers > 1:
        max_over_workers(runtime, [0.0])
