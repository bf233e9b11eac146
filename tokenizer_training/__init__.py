"""Stage 1: read a corpus and train a unigram tokenizer on it.

In reading order: `train_unigram` is the command; `corpus` finds and reads the text, also for stage 2; `unigram` counts
words, trains the pieces and reports on them; `tokenizer` loads and saves what all later stages use.
"""
