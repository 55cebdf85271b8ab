"""What is known before a run: what each device stores, computes and receives, from traced programs."""
