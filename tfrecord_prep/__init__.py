"""Stage 2: tokenize a corpus, cut it into rows of fixed length and write them as TFRecord shards."""
