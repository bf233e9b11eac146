"""Stage 1: train a unigram tokenizer on a corpus.

In reading order: `train_unigram` is the command; `unigram` counts words, trains the tokens and reports on them.
`mlm_common.corpus` reads the text, and `mlm_common.tokenizer` loads and saves what all later stages use.
"""
