"""Training: the step, the loss, the optimiser, and the loop around them."""
