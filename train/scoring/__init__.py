"""What a masked language model is worth without fine-tuning: its scores, and what chance would have scored."""
