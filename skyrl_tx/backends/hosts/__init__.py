"""Run one backend on multiple hosts: rank 0 leads, and the other ranks repeat its calls.

This package knows the contract, but no backend.
"""
