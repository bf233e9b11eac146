"""Files in a local folder or in Google Cloud Storage, read and written the same way."""
