"""Experiments and proofs of one moment, with their results. Run from a clone: `python -m lab.NAME --help`.

Knows the product, the benchmarks and the recipes; none of them knows it, and no wheel holds it.
"""
