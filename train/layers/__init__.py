"""What layers are made of: random bits by keys, dropout, attention and products as a TPU computes them cheapest."""
