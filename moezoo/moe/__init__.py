"""Mixture of experts: router, experts, dispatch strategies, and statistics of routing."""
