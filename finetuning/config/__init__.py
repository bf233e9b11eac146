"""What a fine-tuning run is told."""
