"""The Hugging Face Hub: whether a push would succeed, the push, with its requests repeated, and what it may tell."""
