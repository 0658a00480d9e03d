"""A first hour on a GPU: everything that is measured there, unattended."""
