"""Formats of few bits, each in a file of its own: how a folder names, shapes and states weights in it."""
