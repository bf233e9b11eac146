"""A fine-tuning run: its model opened, trained by the loop of pretraining, and its results written."""
