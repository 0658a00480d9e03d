"""Attention over packed sequences and over pages, rotary positions, writing and reading of KV pages."""
