"""What the compilers make of the hot kernels, read from machine code: no GPU is needed."""
