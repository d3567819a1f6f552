"""Tokens: text to ids and back, and whole corpora to memory-mapped ids."""
