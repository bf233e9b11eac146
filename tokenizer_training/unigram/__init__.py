"""The unigram tokenizer: normalization, counted words, the trained pieces, and a report of its quality."""
