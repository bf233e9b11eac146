"""The doctor's checks, one file a subject."""
