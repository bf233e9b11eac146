"""All that a step changes, by name: weights, moments, step, and the means of the log; to the host and back."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from mlm_common.errors import RunFailedError
from train.checkpoints.store import Arrays
from train.train_step import PretrainingModel


class TrainingState:
    """The variables of a model under training.

    Names do not depend on what else was built in the process, nor on the replicas: `model/roberta/…`,
    `optimizer/iterations`, `optimizer/first_moment/roberta/…`, `metrics/loss/total`.
    """

    def __init__(self, model: PretrainingModel):
        self._strategy = model.distribute_strategy
        variables = model.network.variables
        weights = dict(zip(_names(variables, model.network.name), variables, strict=True))
        names = {variable.ref(): name for name, variable in weights.items()}
        trained = [names[variable.ref()] for variable in model.network.trainable_variables]
        self._variables = {f"model/{name}": variable for name, variable in weights.items()}
        for name, variable in model.optimizer.state_of(trained).items():
            self._variables[f"optimizer/{name}"] = variable
        self._means: dict[str, tf.Variable] = {}
        self._replicas_means = tf.function(self._read_on_replicas)
        for metric in model.metrics:
            for name, variable in zip(_names(metric.variables, metric.name), metric.variables, strict=True):
                self._means[f"metrics/{metric.name}/{name}"] = variable

    def read(self) -> Arrays:
        """Copy all variables; waits for the device."""
        arrays = {name: np.asarray(variable.numpy()) for name, variable in self._variables.items()}
        return arrays | self._read_means()

    def write(self, arrays: Arrays) -> None:
        """Set all variables, on all replicas.

        Raises:
            RunFailedError: names, shapes or types are not those of the variables.
        """
        self._check(arrays)
        for name, variable in self._variables.items():
            variable.assign(arrays[name])
        self._write_means([tf.constant(arrays[name]) for name in self._means])

    # Of the means each replica has its own, all equal. Read together they would be summed, and divided when set, which
    # rounds for some numbers of replicas; so each is read and set where it is.

    def _read_means(self) -> Arrays:
        firsts = (self._strategy.experimental_local_results(value)[0].numpy() for value in self._replicas_means())
        return {name: np.asarray(value) for name, value in zip(self._means, firsts, strict=True)}

    def _read_on_replicas(self) -> list[tf.Tensor]:
        def read() -> list[tf.Tensor]:
            return [variable.read_value() for variable in self._means.values()]

        return self._strategy.run(read)

    def _write_means(self, values: Sequence[tf.Tensor]) -> None:
        def assign(values: Sequence[tf.Tensor]) -> None:
            for variable, value in zip(self._means.values(), values, strict=True):
                variable.assign(value)

        tf.function(self._strategy.run)(assign, args=(values,))

    def _check(self, arrays: Arrays) -> None:
        variables = {**self._variables, **self._means}
        expected = {name: (np.dtype(one.dtype.as_numpy_dtype), tuple(one.shape)) for name, one in variables.items()}
        found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if differing:
            first = differing[0]
            raise RunFailedError(
                f"A checkpoint must have the variables of the model; {len(differing)} differ, the first {first}: "
                f"{_shown(found.get(first))} there, {_shown(expected.get(first))} here. Resume with the versions of "
                "the libraries that run.json names, or start anew with --resume never in another --output-dir."
            )


def _names(variables: Sequence[tf.Variable], outermost: str) -> list[str]:
    """Make unique names without that of the outermost layer, which counts the models built before."""
    names = [variable.name.split(":")[0].removeprefix(f"{outermost}/") for variable in variables]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        if counts[name] > 1:
            names[index] = f"{name}#{seen[name]}"
            seen[name] += 1
    return names


def _shown(kind: tuple[np.dtype, tuple[int, ...]] | None) -> str:
    return f"{kind[0]}{list(kind[1])}" if kind else "none"
