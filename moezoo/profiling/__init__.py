"""Compiled programs and traces of them: instructions by computation, and where the time of a step goes."""
