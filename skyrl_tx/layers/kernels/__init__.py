"""Kernels for one kind of device, chosen by platform and type (see `registry`).

Each kernel computes the same as plain JAX code, which is used on other devices and is its reference
in tests.
"""
