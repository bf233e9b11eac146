"""Pretraining tasks: predicting masked tokens, and classifying pairs of segments."""
