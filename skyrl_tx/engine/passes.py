"""Forward and backward passes: many requests in one batch, answered one by one."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.contract.results import PassResult
from skyrl_tx.engine import prepare, validate
from skyrl_tx.engine.answers import Answer
from skyrl_tx.engine.room import ENDS_ENGINE, Room
from skyrl_tx.engine.work import Work
from skyrl_tx.failpoints import reach

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked request and what the backend gets of it."""

    work: Work
    model_id: ModelId
    backward: bool
    examples: tuple[PassExample, ...]


@dataclass(slots=True)
class _Batch:
    """Requests that began together, in the groups in which they run one after the other; `on_device`: the first.

    `long_of`: the session whose long pass it is, if it is one.
    """

    models: frozenset[ModelId]
    long_of: SessionId | None
    groups: deque[Sequence[_Prepared]]
    on_device: Pass | None = None


class Passes:
    """Batches of different models, a micro-batch of each in turn.

    When one fails, its requests run again alone, so that only the culprit fails.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._batches: deque[_Batch] = deque()  # the one whose turn it is first

    @property
    def num_under_way(self) -> int:
        """How many batches have begun and not ended."""
        return len(self._batches)

    @property
    def with_long(self) -> set[SessionId]:
        """The sessions that have a long pass under way."""
        return {batch.long_of for batch in self._batches if batch.long_of is not None}

    @property
    def has_suspect(self) -> bool:
        """Whether what is under way may be to blame for an engine's end."""
        return any(request.work.is_suspect for batch in self._batches for request in batch.groups[0])

    def begin(self, works: Sequence[Work], *, is_long: bool) -> None:
        """Start a batch, of models that no other is under way on; requests that cannot run are answered now."""
        requests = [prepared for work in works if (prepared := self._prepare(work)) is not None]
        fit = {work.request_id for work in self._room.attempt([request.work for request in requests])}
        requests = [request for request in requests if request.work.request_id in fit]
        if requests:
            models = frozenset(request.model_id for request in requests)
            long_of = requests[0].work.session_id if is_long else None
            batch = _Batch(models, long_of, deque([requests]))
            self._room.models.busy.update(batch.models)
            self._batches.append(batch)

    def go_on(self) -> bool:
        """Take the batch whose turn it is one micro-batch further; at its end, answer. Whether there was any."""
        if not self._batches:
            return False
        batch = self._batches.popleft()
        self._advance(batch)
        if batch.groups:
            self._batches.append(batch)
        else:
            self._room.models.busy.difference_update(batch.models)
        return True

    def _advance(self, batch: _Batch) -> None:
        requests = batch.groups[0]
        try:
            if batch.on_device is None:
                batch.on_device = self._start(requests)
            is_dispatched = batch.on_device.step()
            reach("engine.dispatched")
            if not is_dispatched:
                return
            results = batch.on_device.results()
        except ENDS_ENGINE:
            raise
        except Exception as error:
            if batch.on_device is not None:
                batch.on_device.abort()
            batch.on_device = None
            batch.groups.popleft()
            if len(requests) > 1:
                _log.warning("a batch of %d requests failed; each runs alone now: %s", len(requests), error)
                batch.groups.extend([request] for request in requests)
            else:
                self._room.fail(requests[0].work, error)
            return
        batch.on_device = None
        batch.groups.popleft()
        self._answer(requests, results)

    def _prepare(self, work: Work) -> _Prepared | None:
        request = work.model_pass
        assert request is not None and work.model_id is not None
        try:
            self._room.models.get(work.model_id)
            validate.check_pass(request, self._room.capabilities)
            examples = prepare.pass_examples(work.request_id, work.model_id, request, self._room.capabilities)
        except Exception as error:
            self._room.fail(work, error)
            return None
        return _Prepared(work, work.model_id, request.backward, tuple(examples))

    def _start(self, requests: Sequence[_Prepared]) -> Pass:
        # Here, after they are marked as begun: to bring a model back can take the engine down as well.
        self._room.models.ensure({request.model_id for request in requests})
        batch = prepare.pass_batch([request.examples for request in requests])
        return self._room.backend.begin_pass(batch, backward=requests[0].backward)

    def _answer(self, requests: Sequence[_Prepared], results: list[PassResult]) -> None:
        start = 0
        for request in requests:
            end = start + len(request.examples)
            output = prepare.pass_output(results[start:end], request.work.num_tokens)
            effect = self._room.models.get(request.model_id).next_effect() if request.backward else None
            # Each by itself: in one transaction the first would be told only with the last, of hundreds perhaps.
            self._room.answers.give([Answer(work=request.work, result=output, effect_order=effect)])
            start = end
        assert start == len(results), f"the backend gave {len(results)} results for {start} examples"
