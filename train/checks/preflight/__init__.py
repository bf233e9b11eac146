"""The training step, compiled by the TPU's compiler on any machine: memory and modelled time."""
