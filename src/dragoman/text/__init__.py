"""Text: parallel lines streamed from files, cleaned, normalised, and the public corpora that they come from."""
