"""Quality, memory and speed."""
