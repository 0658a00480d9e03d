"""Shapes of the benchmark: what they cost, random inputs, and their results in fp64. A file for each kernel family."""
