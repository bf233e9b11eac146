"""What `doctor.py` checks, one module per subject; each check is a function that yields findings."""
