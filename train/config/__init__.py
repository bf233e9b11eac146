"""The settings of a run, and where they come from: flags, files and presets.

Annotations say which settings may differ when a run resumes: `seed: int` may not, `dropout: Changeable[float]` may.
"""

from typing import Annotated, TypeVar

from mlm_common.cli.settings import Mark

Value = TypeVar("Value")

MAY_CHANGE = Mark("Its value may differ when a run resumes. All other settings are part of the run's fingerprint.")
PER_WORKER = Mark("Its value may differ between the workers of a run.")
ROUNDING = Mark("Its value affects only how sums are rounded.")
ADDED = Mark("Older runs do not have it, and count as if they had its default.")

Changeable = Annotated[Value, MAY_CHANGE]
PerWorker = Annotated[Value, MAY_CHANGE, PER_WORKER]
Rounding = Annotated[Value, MAY_CHANGE, ROUNDING]
Added = Annotated[Value, ADDED]
