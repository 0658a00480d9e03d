"""Losses on an output projection whose logits never exist as a whole."""
