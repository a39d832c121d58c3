"""A server for training and sampling language models with the Tinker API."""

__version__ = "0.2.0"

DISTRIBUTION = "skyrl-tx-server"
"""The name that pip knows; `skyrl-tx` on PyPI, which is the same as `skyrl_tx`, is another project."""
