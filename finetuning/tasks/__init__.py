"""What is learned: heads, their losses and figures."""
