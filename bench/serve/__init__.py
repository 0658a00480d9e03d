"""Serving beside transformers, and where a decode step leaves a GPU idle."""
