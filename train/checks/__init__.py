"""Checks before you pay for a TPU: of the machine and the run (doctor), of memory and time (preflight)."""
