"""Distillation beside TRL's trainer of it."""
