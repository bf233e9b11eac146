"""The Hugging Face Hub: check whether a push can succeed, push with retries, redact what is published."""
