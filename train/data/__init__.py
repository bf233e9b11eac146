"""The input pipeline: open and check shards, shuffle them without state so that runs can resume, batch with tf.data."""
