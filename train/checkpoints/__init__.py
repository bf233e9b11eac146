"""Checkpoints of a run: written by a thread, checked when read, and the rules of resuming from them."""
