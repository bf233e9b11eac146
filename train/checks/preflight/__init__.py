"""Compile the training step with the TPU compiler on any machine, and report memory and estimated time."""
