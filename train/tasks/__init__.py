"""What is learned: masked tokens, and with them what two segments are to each other."""
