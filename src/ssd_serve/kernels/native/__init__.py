"""Kernels for CPUs in C, compiled once on the machine that runs them. Nothing needs them: each has a slower
equal in torch or numpy, which is used where there is no compiler."""
