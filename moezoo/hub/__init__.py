"""Hugging Face folders, in and out, and the comparison of their models with transformers'."""
