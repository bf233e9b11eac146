"""The Hugging Face Hub: whether a push would succeed, and the push, with its requests repeated."""
