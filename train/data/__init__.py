"""Shards to batches: opened and checked, shuffled by arithmetic, read as tf.data."""
