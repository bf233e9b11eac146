"""Settings of fine-tuning and of predictions."""
