"""Code that every stage uses: corpus, tokenizer, command line, storage, the Hub, worker processes, plots, errors."""
