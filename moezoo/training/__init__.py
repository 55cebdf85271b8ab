"""Training: the step, the loss, the loop around them, checkpoints, and what a run prints and writes."""
