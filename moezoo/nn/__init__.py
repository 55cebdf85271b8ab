"""The parts around the experts: projections, norms, rotary positions, attention and its cache, the MLP."""
