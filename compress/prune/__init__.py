"""Pruning: fewer layers."""
