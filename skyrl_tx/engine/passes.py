"""Forward and backward passes: many requests in one batch, answered one by one."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId
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


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch on its way."""

    requests: Sequence[_Prepared]
    on_device: Pass


class Passes:
    """At most one batch at a time. When one fails, its requests run again alone, so that only the culprit fails."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._running: _Running | None = None
        self._alone: deque[_Prepared] = deque()

    @property
    def is_active(self) -> bool:
        """Whether a batch is under way; the next one must wait."""
        return self._running is not None or bool(self._alone)

    @property
    def has_suspect(self) -> bool:
        """Whether what is under way may be to blame for an engine's end."""
        return self._running is not None and any(request.work.is_suspect for request in self._running.requests)

    def begin(self, works: Sequence[Work]) -> None:
        """Start a batch; requests that cannot run are answered now."""
        requests = [prepared for work in works if (prepared := self._prepare(work)) is not None]
        fit = {work.request_id for work in self._room.attempt([request.work for request in requests])}
        self._start([request for request in requests if request.work.request_id in fit])

    def step(self) -> None:
        """Take the batch one micro-batch further; at its end, answer."""
        if self._running is None:
            self._start([self._alone.popleft()])
            return
        running = self._running
        try:
            is_dispatched = running.on_device.step()
            reach("engine.dispatched")
            if not is_dispatched:
                return
            results = running.on_device.results()
        except ENDS_ENGINE:
            raise
        except Exception as error:
            running.on_device.abort()
            self._running = None
            self._failed(running.requests, error)
            return
        self._running = None
        self._answer(running.requests, results)

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

    def _start(self, requests: Sequence[_Prepared]) -> None:
        if not requests:
            return
        # Here, after they are marked as begun: to bring a model back can take the engine down as well.
        batch = prepare.pass_batch([request.examples for request in requests])
        try:
            self._room.models.ensure({request.model_id for request in requests})
            self._running = _Running(requests, self._room.backend.begin_pass(batch, backward=requests[0].backward))
        except ENDS_ENGINE:
            raise
        except Exception as error:
            self._failed(requests, error)

    def _failed(self, requests: Sequence[_Prepared], error: Exception) -> None:
        if len(requests) > 1:
            _log.warning("a batch of %d requests failed; each runs alone now: %s", len(requests), error)
            self._alone.extend(requests)
            return
        self._room.fail(requests[0].work, error)

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
