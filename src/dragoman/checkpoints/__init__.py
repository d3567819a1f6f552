"""What is on disk: a model folder that is enough to translate, and beside it what resuming needs."""
