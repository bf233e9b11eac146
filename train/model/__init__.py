"""The model: configuration, architectures, TPU-optimized layers, and weights to start from."""
