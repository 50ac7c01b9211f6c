"""Faults at random against the whole: `python -m tests.chaos`, and its companions `.fuzz` and `.soak`."""
