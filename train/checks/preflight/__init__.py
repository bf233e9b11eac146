"""The training step, compiled by the TPU's own compiler on any machine: memory and modelled time."""
