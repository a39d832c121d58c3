"""A Tinker server for hardware you own."""

__version__ = "0.1.0"
