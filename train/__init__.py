"""Training: data, objectives, one loop, checkpoints and tracking. README.md draws a batch's path."""
