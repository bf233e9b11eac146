"""The export in PyTorch layout, the model card, and pushes to the Hub."""
