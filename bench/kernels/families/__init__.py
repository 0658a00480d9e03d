"""A file for each family of kernels: shapes, their costs, random inputs and results in fp64; who else computes these.

Peers are torch's own and what is installed. Plans, copies into another layout and compilation happen in an adapter; the
call that it returns is what a peer would do in every layer. An adapter may raise: the benchmark writes down why.
"""
