"""Imports a model of the recipe."""
