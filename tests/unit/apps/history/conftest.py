"""Fixtures: the engine harness, because history is written with each result."""

from tests.unit.engine.conftest import api_is_there_for_long, harness

__all__ = ["api_is_there_for_long", "harness"]
