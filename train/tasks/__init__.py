"""What is learned: the masked-language-model task and its masks."""
