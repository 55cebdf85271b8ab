"""Generate text: prompts and their continuations."""
