"""What is known before a run: the bytes that a step's collectives bring to each device, by formula."""
