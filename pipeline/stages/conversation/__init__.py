"""Answers over HTTP."""
