"""The environment of a run: its plan, devices, workers, output folder and supervisor, and how it stops."""
