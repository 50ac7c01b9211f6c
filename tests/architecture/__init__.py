"""Rules that hold for the source as a whole, checked by reading it."""
