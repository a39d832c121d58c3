"""Kernels: parts of the computation written for one kind of device, chosen by platform and type.

Each computes what plain JAX computes elsewhere, which is its reference in tests. `choice` has the table.
"""
