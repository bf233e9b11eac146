"""Stage 1: train a unigram tokenizer on a corpus.

In reading order: `train_unigram` is the command; `corpus_sample` counts words, `trainer` trains the tokens, and
`report` says how well they fit. `compare_tokenizers` is a command that measures any tokenizers on your text.
`mlm_common.corpus` reads the text, and `mlm_common.tokenizer` loads and saves what all later stages use.
"""
