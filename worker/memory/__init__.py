"""Memory of the worker: caps in force, and what the process uses."""
