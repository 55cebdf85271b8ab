"""Mixture of experts: router, experts, the strategies that bring them together, and the statistics of routing."""
