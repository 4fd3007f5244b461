"""Training state beyond tensors: random number generators."""
