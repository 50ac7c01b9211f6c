"""The whole: clients, daemon, workers and tiny models."""
