"""Read and write Hugging Face folders, and compare their models with transformers."""
