"""The models: the paper's whole in `transformer.py`, its descendants as small files on the same blocks."""
