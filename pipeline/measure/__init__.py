"""What stages measure of models: quality, speed, gates, parity of trainer and server."""
