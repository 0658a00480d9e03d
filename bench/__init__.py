"""Benchmarks beside peers: both sides in one run, medians, results in `bench/results/` with hardware and versions."""
