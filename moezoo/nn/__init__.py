"""The parts around the experts: projections, norms, rotary positions, attention, and what a language model is."""
