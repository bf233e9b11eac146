"""A fine-tuning run: open the model, train it with the training loop of pretraining, and write the results."""
