"""The corpus: text files, a Hub data set or the built-in one, read in partitions, in train and held-out parts."""
