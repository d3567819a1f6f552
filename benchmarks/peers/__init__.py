"""Other people's models in the training loop that someone who knows PyTorch would write around them."""
