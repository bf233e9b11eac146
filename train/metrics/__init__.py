"""The log and its plots, trackers, the progress bar, and the comparison of runs."""
