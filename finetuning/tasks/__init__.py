"""The fine-tuning tasks, one per file: reading and encoding of examples, heads, losses and scores."""
