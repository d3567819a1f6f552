"""Residual socket: how a sub-layer, its residual connection and its normalisation go together."""
