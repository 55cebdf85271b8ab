"""What is known before a run: what a step's collectives bring a device, by formula."""
