"""Mixture of depths."""
