"""One step: gradients of a task's loss over the global batch, what the optimizer makes of them; and an evaluation."""
