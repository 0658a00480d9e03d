"""Clusters that nobody has here, simulated."""
