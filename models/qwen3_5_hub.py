"""Qwen3-Next and Qwen3.5 from and to the config.json of a Hugging Face folder, and their tensor names."""

from moezoo.models.hub import Hub

HUB = Hub({}, {}, lambda config: config.model_type)
