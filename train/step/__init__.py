"""The training step: gradients over the global batch, clipping and the optimizer. Also evaluation."""
