"""What kernels of all families share: Triton's set-up, C sources compiled at first use, tiles of ragged batches."""
