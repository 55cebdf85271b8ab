"""The configuration groups that Hydra composes; YAML only."""
