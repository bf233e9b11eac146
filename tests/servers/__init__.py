"""Stand-ins for Google Cloud Storage and the Hugging Face Hub that run on the loopback interface."""
