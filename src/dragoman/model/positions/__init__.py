"""Position socket: how a model learns the order of its tokens."""
