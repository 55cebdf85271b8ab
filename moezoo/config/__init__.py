"""The configuration of a run: its settings, how Hydra composes them, and the mesh and execution that follow."""
