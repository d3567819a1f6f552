"""From batches to trained weights: the loss, the schedule, the update, and many devices that share it."""
