"""Stage 1: read a corpus and train a unigram tokenizer on it."""
