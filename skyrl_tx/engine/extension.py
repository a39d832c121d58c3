"""The parts of an optional feature in the engine process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExtension:
    """Result observers, retention rules and admission of one feature."""
