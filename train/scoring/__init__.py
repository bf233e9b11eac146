"""Scores of masked language models without fine-tuning, and the scores that chance alone would give."""
