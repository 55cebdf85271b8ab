"""The configuration of a run: settings, overrides, composition, and the execution that follows from it."""
