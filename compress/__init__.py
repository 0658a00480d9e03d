"""Algorithms that turn one model into a smaller one."""
