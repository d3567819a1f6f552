"""Exchange: other people's models in, ours out. The engines it speaks to come with the extra `export`."""
