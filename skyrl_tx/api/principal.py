"""Who is asking. Every row belongs to an owner, and every look-up is made for one."""

from dataclasses import dataclass

LOCAL_OWNER = "local"


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner in whose name a call is made."""

    owner: str


async def principal() -> Principal:
    """Take anyone for the one local owner: the server listens where only its user can reach it, any key will do."""
    return Principal(LOCAL_OWNER)
