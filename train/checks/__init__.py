"""What is checked before a TPU is paid for: the machine and the run (doctor), memory and time (preflight)."""
