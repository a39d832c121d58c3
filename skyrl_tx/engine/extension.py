"""What an optional feature adds to the engine process."""

from dataclasses import dataclass

from skyrl_tx.engine.admission import MakeAdmission


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExtension:
    """Result observers, retention rules and admission of one feature."""

    admission: MakeAdmission | None = None
    """Makes the object that decides which requests start. At most one feature has it."""
