"""Code that every stage uses: corpus, tokenizer, command line, storage, the Hub, worker processes, plots, errors."""

import os

# `PyTorch was not found` is no problem here. The variable has an effect only if it is set before transformers is
# imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
