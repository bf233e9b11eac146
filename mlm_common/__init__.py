"""Code that every stage uses: corpus, tokenizer, command line, storage, the Hub, worker processes, plots, errors."""

import os

# `PyTorch was not found` is no problem here. It has an effect only before transformers is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
