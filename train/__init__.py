"""Stage 3: pretrain a masked language model on the shards of stage 2 and export it."""

# Before any module here imports TensorFlow or transformers: both read it when they are imported.
from train import environment as environment
