"""From files of texts and labels to batches of a few static lengths."""
