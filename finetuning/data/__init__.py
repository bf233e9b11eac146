"""Read files of texts and labels, and make batches of a few static lengths."""
