"""A file for each family of kernels: shapes, their costs, random inputs and results in fp64; who else computes these.

Peers are torch's own and what is installed. An adapter takes one set of inputs and returns the call to time, or, for
what is differentiated or multiplied, a function of the shape's leaves. Plans, copies into another layout and
compilation happen in the adapter; the call is what a peer would do in every layer. An adapter may raise: the benchmark
writes down why.
"""
