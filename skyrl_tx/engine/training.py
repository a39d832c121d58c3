"""Run training requests: passes in batches of multiple requests, other requests one at a time."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from typing_extensions import override

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.errors import ErrorCategory, ServerError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import Failure, PassResult
from skyrl_tx.engine import prepare, request_checks
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.context import FATAL_ERRORS, EngineContext
from skyrl_tx.engine.fair_share import FairShare
from skyrl_tx.engine.handlers import handle, refuse
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.schedule import RunningBatch, ScheduledBatch
from skyrl_tx.process.failpoints import failpoint

_log = logging.getLogger(__name__)
_NON_PASS_COST = 0.25
"""Cost in micro-batches of a request that is no pass, for fair sharing.

It is small because, for example, an optimizer step does not read the base weights.
"""


@dataclass(frozen=True, slots=True)
class _PreparedPass:
    """A valid request with its examples for the backend."""

    queued: QueuedRequest
    model_id: ModelId
    backward: bool
    num_tokens: int
    examples: tuple[PassExample, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch(RunningBatch):
    """Requests that started together. They run in groups, one group after the other.

    A batch starts with a single group of all its requests. If this group fails, each request
    becomes a separate group.
    """

    groups: deque[Sequence[_PreparedPass]]
    running_pass: Pass | None = None
    """The running pass of the first group."""
    taken: DeviceTime = field(default_factory=lambda: DeviceTime("pass"))
    """The device time of the first group so far."""

    @property
    @override
    def is_waiting(self) -> bool:
        return self.running_pass is not None and self.running_pass.is_waiting


class TrainingExecutor:
    """Runs batches of different models, one micro-batch at a time.

    Owners share the device by weight, and the batches of one owner take turns. If a batch fails,
    each of its requests runs again alone, so that only the request that caused the failure fails.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._batches: dict[str, deque[_Batch]] = {}  # by owner; the least recently served owner and batch first
        self._fair_share = FairShare(lambda: context.admission.weights)
        self._has_multiple_owners = False

    def set_has_multiple_owners(self, has_multiple_owners: bool) -> None:
        """Set whether multiple owners have requests.

        While there is a single owner, work is not charged. The virtual times from before are then
        forgotten, so no owner pays later for work at a time without other owners.
        """
        if self._has_multiple_owners and not has_multiple_owners:
            self._fair_share.reset()
        self._has_multiple_owners = has_multiple_owners

    def drop_credit(self, owner: str) -> None:
        """Drop the credit of an owner that was idle or waited, see `FairShare.drop_credit`.

        An owner with running batches keeps its virtual time: its requests may just have waited for
        those batches.
        """
        if owner not in self._batches:
            self._fair_share.drop_credit(owner)

    def should_run_before(self, owner: str) -> bool:
        """Whether running batches come before the next request of an owner.

        The request is no pass, for example an optimizer step.
        """
        if not self._batches or not self._has_multiple_owners:
            return bool(self._batches)
        return min(map(self._fair_share.get_virtual_time, self._batches)) < self._fair_share.get_virtual_time(owner)

    @property
    def is_waiting(self) -> bool:
        """Whether there are running batches and all of them wait for the compiler."""
        return bool(self._batches) and all(self._find_runnable_batch(owner) is None for owner in self._batches)

    @property
    def num_running_requests(self) -> int:
        """Number of requests in running batches."""
        return sum(len(group) for batch in self.list_running() for group in batch.groups)

    def list_running(self) -> list[_Batch]:
        """Return the running batches."""
        return [*chain.from_iterable(self._batches.values())]

    def start_scheduled(self, scheduled: ScheduledBatch) -> None:
        """Start a batch of passes, or execute a single request of another kind."""
        first = scheduled.requests[0]
        _log.debug(
            "%s: %d requests, first %s of %s", first.kind, len(scheduled.requests), first.request_id, first.model_id
        )
        if scheduled.refusal is not None:
            refused = Failure(message=scheduled.refusal, category=ErrorCategory.USER)
            self._context.request_log.commit(first, refused)  # not `fail`: the gradient stays complete
        elif scheduled.failure is not None:
            refuse(self._context, first, scheduled.failure)
        elif first.model_pass is not None:
            self._start_batch(scheduled.requests, is_long=scheduled.is_long)
        else:
            if self._has_multiple_owners:
                self._fair_share.charge(first.owner, _NON_PASS_COST)
            handle(self._context, first)

    def run_micro_batch(self) -> bool:
        """Dispatch one micro-batch of the next batch. Returns True if a batch is running.

        After the last micro-batch of a group, commit the results. If all batches wait for the
        compiler, the first of them waits for a short time.
        """
        if not self._batches:
            return False

        # Choose a batch: by the virtual time of its owner, or in turns if there is one owner.
        runnable = {owner: batch for owner in self._batches if (batch := self._find_runnable_batch(owner)) is not None}
        candidates = runnable or {owner: batches[0] for owner, batches in self._batches.items()}
        if self._has_multiple_owners:
            owner = min(candidates, key=self._fair_share.get_virtual_time)
            if runnable:
                self._fair_share.charge(owner, 1.0)  # all micro-batches have about the same number of tokens
        else:
            owner = next(iter(candidates))

        # Run it, then move it and its owner to the end.
        batches, batch = self._batches.pop(owner), candidates[owner]
        batches.remove(batch)
        self._advance_batch(batch)
        if batch.groups:
            batches.append(batch)
        else:
            self._context.models.busy.difference_update(batch.models)
        if batches:
            self._batches[owner] = batches
        return True

    def _find_runnable_batch(self, owner: str) -> _Batch | None:
        """Return an owner's next batch that does not wait for the compiler, or None."""
        return next((batch for batch in self._batches[owner] if not batch.is_waiting), None)

    def _start_batch(self, requests: Sequence[QueuedRequest], *, is_long: bool) -> None:
        """Start a batch of requests whose models have no running batch.

        Invalid requests fail at once.
        """
        group = [prepared for prepared in map(self._prepare, requests) if prepared is not None]
        if group:
            self._context.attempts.count([prepared.queued.request_id for prepared in group])
            models = frozenset(prepared.model_id for prepared in group)
            self._context.models.busy.update(models)
            first = group[0].queued
            batch = _Batch(
                models=models,
                owner=first.owner,
                session_id=first.session_id,
                is_long=is_long,
                groups=deque([group]),
            )
            self._batches.setdefault(first.owner, deque()).append(batch)

    def _advance_batch(self, batch: _Batch) -> None:
        """Dispatch the next micro-batch of the first group.

        After the last micro-batch of the group, finish the group.
        """
        requests, clock = batch.groups[0], self._context.device_clock
        results: list[PassResult] | Exception
        try:
            # Start the group. Its attempts are counted already, because restoring a model may crash
            # the engine.
            if batch.running_pass is None:
                batch.taken = DeviceTime("pass")
                self._context.models.ensure_resident({request.model_id for request in requests})
                examples = tuple(example for request in requests for example in request.examples)
                prepared = PreparedModelPassBatch(examples=examples)
                batch.running_pass = self._context.backend.begin_pass(prepared, backward=requests[0].backward)

            # Dispatch a micro-batch. After the last one, fetch the results.
            with clock.measure_dispatch(batch.taken):
                is_dispatched = batch.running_pass.step()
            failpoint("engine.dispatched")
            if not is_dispatched:
                return
            with clock.measure_completion(batch.taken):
                results = batch.running_pass.results()
        except FATAL_ERRORS:
            raise
        except Exception as error:
            if batch.running_pass is not None:
                batch.running_pass.abort()
            results = error

        # Commit the results. If the group has failed, run each of its requests alone.
        batch.running_pass = None
        batch.groups.popleft()
        if not isinstance(results, Exception):
            self._commit(requests, results, batch.taken)
        elif len(requests) == 1:
            self._context.fail(requests[0].queued, results)
        else:
            _log.warning("a batch of %d requests failed; running each request alone: %s", len(requests), results)
            batch.groups.extend([request] for request in requests)

    def _prepare(self, queued: QueuedRequest) -> _PreparedPass | None:
        """Check a request and make its examples. Returns None if the request has failed."""
        request = queued.model_pass
        assert request is not None and queued.model_id is not None
        try:
            queued.check_crashes(self._context.settings.max_attempts)
            self._context.models.get(queued.model_id)
            request_checks.check_pass(request, self._context.capabilities)
            examples = prepare.make_pass_examples(
                queued.request_id, queued.model_id, request, self._context.capabilities
            )
        except Exception as error:
            self._context.fail(queued, error)
            return None
        return _PreparedPass(queued, queued.model_id, request.backward, queued.num_tokens, tuple(examples))

    def _commit(self, requests: Sequence[_PreparedPass], results: list[PassResult], taken: DeviceTime) -> None:
        """Commit the result of each request. Device time is divided by the number of tokens.

        A request whose results have the wrong form fails. With a wrong number of results, all fail.
        """
        try:
            prepare.check_pass_count(len(results), sum(len(request.examples) for request in requests))
        except ServerError as error:
            for request in requests:
                self._context.fail(request.queued, error)
            return

        start = 0
        per_token_s = taken.device_s / sum(request.num_tokens for request in requests)
        for request in requests:
            end = start + len(request.examples)
            share = replace(taken, device_s=per_token_s * request.num_tokens)
            self._commit_request(request, results[start:end], share)
            start = end

    def _commit_request(self, request: _PreparedPass, results: list[PassResult], taken: DeviceTime) -> None:
        """Commit the result of one request.

        One transaction per request: otherwise the first client would wait for the last result.
        """
        try:
            prepare.check_pass_results(request.examples, results)
        except ServerError as error:
            self._context.fail(request.queued, error)
            return

        output = prepare.combine_pass_results(results, request.num_tokens)
        model = self._context.models.get(request.model_id)
        effect_order = model.assign_effect_order() if request.backward else None
        observed = self._context.observers.collect_rows(
            lambda observer: observer.observe_pass(request.queued, model, output, request.num_tokens, taken)
        )
        self._context.request_log.commit(request.queued, output, effect_order=effect_order, observed=observed)
