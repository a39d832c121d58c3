"""Waiting for a database that cannot be written for now."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sqlmodel import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How a process waits for a database that is full or locked, instead of failing."""

    until: threading.Event
    """Once this is set, what cannot be written fails."""
    tell: Callable[[Session, str], None]
    """Writes down what is waited for: little, so that it may fit where nothing else does."""
