"""Checkpoints of a run: written in the background, verified when read, and the rules for resuming from them."""
