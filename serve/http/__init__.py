"""The HTTP side: parses, checks, tokenizes, streams. No torch here."""
