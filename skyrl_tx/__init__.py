"""A server for training and sampling language models with the Tinker API."""

__version__ = "0.3.0"

DISTRIBUTION = "skyrl-tx-server"
"""The name of the package for pip.

`skyrl-tx` on PyPI (the same as `skyrl_tx`) is a different project.
"""
