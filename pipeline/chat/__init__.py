"""`potstill chat`: a conversation on the terminal, with a model in this process or behind a server."""
