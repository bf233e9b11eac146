"""What every stage uses: the corpus, the tokenizer, command lines, storage, the Hub, worker processes, plots, errors."""
