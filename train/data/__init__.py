"""The input pipeline: shards opened and checked, a stateless, resumable shuffle, batches as tf.data."""
