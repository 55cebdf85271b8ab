"""A folder of Hugging Face, compared with transformers module by module."""
