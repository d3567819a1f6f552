"""Batches: which pairs make one update, in which order, and the tensors they become."""
