"""Whether a configuration fits on devices that are not here, and how fast it can be at best."""
