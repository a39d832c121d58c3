"""Gives samples that wait here to engines that have nothing to do.

The API gives each sample to an engine when it arrives, by the number of requests. Samples take unequal times, so one
engine may end early while others have a queue. An engine gives away what it has not started, in one transaction that
names another engine in the rows: whenever a process ends, each sample belongs to exactly one. Until the commit it is
this engine's, and no other thread could start it meanwhile.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.store import engine_state, placement
from skyrl_tx.store.tables import EngineStateRow

_log = logging.getLogger(__name__)
_MAX_GIVEN = 256
"""Samples that one engine is given at once, so that the loop waits for a short transaction."""


@dataclass(slots=True)
class Spreading:
    """The part of an engine's loop that gives samples away, each time it has looked at the others."""

    context: EngineContext
    sampling: SamplingExecutor
    _newest: int = 0
    """The last sample that was here at the last look. Earlier ones have waited since then, whatever the clocks say."""

    def look(self, rows: Collection[EngineStateRow], running: Collection[int]) -> None:
        """Share what has waited since the last look with the engines that have published that they have no sample."""
        own, waited_up_to, self._newest = self.context.store.engine, self._newest, self.sampling.newest
        idle = [row.number for row in rows if row.number in running and row.number != own and _seems_idle(row)]
        if not idle or not self.sampling.num_waiting:
            return
        waiting = self.sampling.movable(waited_up_to)
        for index, number in enumerate(idle):  # this engine keeps as many as each of them gets
            self._give(number, [each.position for each in waiting[index :: len(idle) + 1][:_MAX_GIVEN]])

    def _give(self, number: int, positions: list[int]) -> None:
        own = self.context.store.engine

        def work(tx: Session) -> list[RequestId]:
            return placement.give(tx, own, number, positions)

        if positions and (given := self.context.store.write(work)):
            self.sampling.forget_given(given)
            _log.info("gave %d samples to engine %d, which has nothing to do", len(given), number)


def _seems_idle(row: EngineStateRow) -> bool:
    load = engine_state.sample_load(row)
    return row.status == "ready" and load is not None and load.num_requests == 0
