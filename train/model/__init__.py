"""The model: its configuration, architectures, layers as suits the TPU, and weights to start from."""
