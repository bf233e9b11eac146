"""The Hugging Face Hub: check that a push can succeed, push with retries, and redact records before publishing."""
