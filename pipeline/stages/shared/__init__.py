"""What several kinds of stages have in common."""
