"""Engines that decode rows, and the contract that they share with the executor."""
