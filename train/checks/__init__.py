"""Checks before you pay for a TPU. The doctor checks the machine and the run; the preflight, memory and time."""
