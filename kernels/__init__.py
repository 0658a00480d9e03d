"""Attention, norms, losses and sampling, each beside the plain PyTorch that defines it."""

# Some transformers releases probe an installed module called `kernels` for a version.
__version__ = "0.1.0"
