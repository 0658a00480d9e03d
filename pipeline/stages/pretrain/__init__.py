"""A new model, trained from fresh weights."""
