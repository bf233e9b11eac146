"""What a task reads from the records of stage 2, tf.train.Examples: names and shapes of their features."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature that every record has.

    shape: of one row's.
    padding: what stands in the rows that fill up the last batch of an evaluation.
    dtype: in the record, int64 or float32; batches hold int32 or float32.
    """

    shape: tuple[int, ...] = ()
    padding: float = 0
    dtype: str = "int64"

    @property
    def batch_dtype(self) -> str:
        """The type in batches."""
        return "int32" if self.dtype == "int64" else self.dtype
