"""What an optional feature adds to the API process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExtension:
    """Routers, pages and error forms of one feature."""
