"""What each device stores, receives and keeps, from placements and traced programs."""
