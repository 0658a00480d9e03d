"""Drafts: who proposes tokens, how many, and how the target verifies them."""
