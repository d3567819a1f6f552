"""Search: from a model's next-token logits to translations, and from given translations to their scores."""
