"""A server for training and sampling language models with the Tinker API."""

__version__ = "0.2.0"
