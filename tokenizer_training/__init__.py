"""Stage 1: train a unigram tokenizer on a corpus.

Read the modules in this order:

- `train_unigram`: the command.
- `corpus_sample`: counts the words of a sample of the corpus.
- `trainer`: trains the tokens on the counted words.
- `report` and `fit`: measure how well the tokens fit the text.
- `compare_tokenizers`: a second command, which measures any tokenizers on your text.

`mlm_common.corpus` reads the text. `mlm_common.tokenizer` loads and saves the tokenizer, which all later stages use.
"""
