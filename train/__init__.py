"""Stage 3: pretrain a masked language model on the shards of stage 2 and export it."""
