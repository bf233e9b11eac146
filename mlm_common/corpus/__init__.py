"""The corpus: text files, a Hub data set or the built-in text, divided into splits, read in partitions or sampled."""
