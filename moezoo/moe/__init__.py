"""Mixture of experts: router, experts, the strategies that bring them together, and what is told of routing."""
