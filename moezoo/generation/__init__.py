"""Continue texts."""
