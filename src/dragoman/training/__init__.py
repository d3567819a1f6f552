"""Training: the loss, the schedule, the optimiser, the update and the loop that yields one report per update."""
