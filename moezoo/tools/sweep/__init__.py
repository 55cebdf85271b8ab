"""A run for each combination of settings, and a table of them."""
