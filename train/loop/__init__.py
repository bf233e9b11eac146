"""A run from its first check to its export: open the inputs, build and restore the model, train, publish."""
