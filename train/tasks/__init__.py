"""Pretraining tasks: masked tokens, and questions about pairs of segments."""
