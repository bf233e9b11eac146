"""What is learned: examples read and encoded, heads, losses and scores, one task a file."""
