"""A runtime: what a run asks of the devices that it computes on, whoever drives them.

`TensorFlowRuntime` is TensorFlow's own, a strategy of `tf.distribute`. `JaxRuntime` gives the steps that TensorFlow has
lowered to JAX's client of the device. Nothing outside this folder knows which one it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from train.runtime.machines import Cluster

# Under which a train function returns the seconds that it waited for input.
WAIT_NAME = "input_wait_seconds"


class StoredVariable(Protocol):
    """A variable as a checkpoint reads and sets it: as one array, whether or not the replicas divide it."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def numpy(self) -> NDArray[Any]: ...

    def assign(self, value: Any) -> Any: ...


class Runtime(ABC):
    """The devices of a run: one replica of the model on each.

    cluster: the processes of the run, one for each host, and which of them this is.
    num_replicas: over all hosts, which have equally many.
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
        """Make a data set of the replicas' batches out of `batches`, which makes that of one host.

        `batches` is given a `tf.distribute.InputContext`. The data set says that it is endless, so its user counts.
        """

    @abstractmethod
    def deal(self, array_of: Callable[[int], NDArray[Any]]) -> Any:
        """Give each replica of this host the array of its number, counted from 0 on this host; all of one shape."""

    @abstractmethod
    def on_replicas(self, function: Callable[..., Any], *, jit_compile: bool) -> Callable[..., Any]:
        """Make `function`, which computes with one replica's part of a batch, a function of batches.

        The results are those of this host's replicas: for each tensor a sequence of values that NumPy can read. A
        program is made for each shape of the batches.
        """

    @abstractmethod
    def train_function(self, model: Any) -> Callable[[Iterator[Any]], dict[str, Any]]:
        """Make what Keras' `fit` calls with an iterator of batches for each execution of `model.train_step`.

        It returns, under `WAIT_NAME`, the seconds in which no batch was ready.
        """

    @abstractmethod
    def variable(self, variable: Any, axis: int | None = None) -> StoredVariable:
        """Return a variable as a checkpoint sees it; `axis` is that along which the replicas divide it."""

    @abstractmethod
    def read(self, variables: Sequence[Any]) -> list[NDArray[Any]]:
        """Read variables of which each replica has an equal copy; waits for the device."""

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[NDArray[Any]]) -> None:
        """Set variables of which each replica has a copy, on all replicas."""

    # TensorFlow's variables are those of its own devices; another runtime has others.

    def pull(self, variables: Iterable[Any]) -> None:  # noqa: B027
        """Let TensorFlow's variables have the values that the devices have; waits for the device."""

    def push(self, variables: Iterable[Any]) -> None:  # noqa: B027
        """Let the devices have the values that TensorFlow's variables have."""

    @contextmanager
    def on_host(self, variables: Sequence[Any]) -> Iterator[None]:
        """Let TensorFlow's variables have the values of the devices within it, for code that reads them."""
        del variables
        yield

    @abstractmethod
    def wait(self, variable: Any) -> None:
        """Wait until all steps so far, which set the variable, are made."""

    @abstractmethod
    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays that the hosts call this with, (hosts, …); each waits for the others."""

    @abstractmethod
    def start_profile(self, folder: str) -> None:
        """Begin a trace of host and device for TensorBoard."""

    @abstractmethod
    def stop_profile(self) -> None:
        """End the trace, and write it."""

    def release(self) -> None:  # noqa: B027
        """Forget the variables of models that are no longer used."""


def max_over_workers(runtime: Runtime, values: Sequence[float]) -> list[float]:
    """Return the greatest that any worker called this with for each value, once all have called it."""
    return list(runtime.gather(np.asarray(values, np.float32)).max(axis=0).tolist())


def wait_for_workers(runtime: Runtime) -> None:
    if runtime.cluster.num_workers > 1:
        max_over_workers(runtime, [0.0])
