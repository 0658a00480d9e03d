"""The engine: requests in, steps, tokens out. No HTTP here."""
