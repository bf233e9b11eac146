"""One training step: gradients over the global batch, clipping, the optimizer; and evaluation."""
