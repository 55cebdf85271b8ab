"""Kernels: a folder each, with one `api` and one file a backend."""
