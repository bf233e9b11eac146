"""The Hugging Face Hub: check whether a push can succeed, push with retries, and redact records before publishing."""
