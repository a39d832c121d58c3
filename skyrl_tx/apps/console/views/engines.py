"""View model of the engines: which one holds what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from skyrl_tx.apps.console.format import short_id
from skyrl_tx.store.placement import Holding

_MAX_LINKS = 20


@dataclass(frozen=True, slots=True)
class EngineLine:
    """One engine."""

    number: int
    where: str
    state: str
    devices: str
    num_models: int
    models: Sequence[tuple[str, str]]
    """Id and short name of the first models that the viewer may see."""
    num_waiting: int
    num_started: int
    activity: str


def engine_lines(holdings: Sequence[Holding], acts_for: Callable[[str], bool]) -> list[EngineLine]:
    """Describe engines; models of owners for whom the viewer does not act are only counted."""
    return [
        EngineLine(
            number=each.engine.number,
            where=f"{each.engine.host or 'this machine'}, process {each.engine.pid}",
            state=each.engine.status if each.is_running else "has ended",
            devices=", ".join(map(str, cast(list[object], each.engine.capabilities.get("devices", [])))),
            num_models=len(each.models),
            models=[(name, short_id(name)) for name, owner in each.models if acts_for(owner)][:_MAX_LINKS],
            num_waiting=each.num_waiting,
            num_started=each.num_started,
            activity=each.engine.activity if each.is_running else "",
        )
        for each in holdings
    ]
