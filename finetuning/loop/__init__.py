"""A fine-tuning run: open the model, train it with the loop of pretraining, and write the results."""
