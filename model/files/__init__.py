"""Model folders on disk: checkpoints, artifacts, adapters."""
