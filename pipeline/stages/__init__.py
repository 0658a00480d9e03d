"""The stages of a run, one folder each, named after its key in a recipe; pipeline/stages/base.py lists them."""
