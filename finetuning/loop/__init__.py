"""A fine-tuning run: opened, trained by the loop of pretraining, scored, and its results written."""
