"""The corpus: text files, a Hub data set or the built-in one, in splits, read in partitions or as a sample."""
