"""Feed-forward socket: what a layer does to each position by itself, [B, T, D] -> [B, T, D]."""
