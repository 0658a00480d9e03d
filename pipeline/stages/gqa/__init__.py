"""Fewer KV heads."""
