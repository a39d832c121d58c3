"""Read the tokens of a running sample request as deltas. Each token is delivered exactly once.

While a request runs, the engine writes new tokens to the database, and `PartialStreams` reads them
from there. Tokens that were not written to the database are taken from the result of the request.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Literal, TypeVar

import numpy as np
from fastapi.concurrency import run_in_threadpool
from sqlmodel import Session

from skyrl_tx.apps.chat.text import SampleText
from skyrl_tx.contract import codec
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.results import Failure, PromptResult, SampledSequence, SampleOutput, TopK
from skyrl_tx.server.context import ApiContext
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import completions, engine_state, futures
from skyrl_tx.store.completions import Partial
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause

_PAGE_SIZE = 1000
_POLL_INTERVAL_S = 20.0
"""A generation reads the database at least this often, in case a notification was lost."""
_CHECK_QUOTA_EVERY_S = 2.0
"""While a generation waits for its first tokens, it checks this often whether a quota was used up.

All generations share the report of `EngineHealth`, so more of them cause no more queries.
"""
_MAX_INLINE = 512
"""How many tokens and top tokens the event loop may process at once."""
CANCELLED = Failure(message="cancelled: the client disconnected", category=ErrorCategory.USER)
_RETRY_HEADERS = {"Retry-After": "5"}
T = TypeVar("T")


Put = Callable[[Sequence[Partial]], None]
"""Takes new tokens of a request. Called on the event loop."""


class PartialStreams:
    """The open streams of this process. One query reads the new tokens of all streams."""

    def __init__(self, store: Store, max_streams: int) -> None:
        self._store = store
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._open: dict[RequestId, tuple[Put, asyncio.AbstractEventLoop]] = {}
        self._owners: Counter[str] = Counter()
        self._position = 0

    def open(self, request_id: RequestId, owner: str, put: Put) -> bool:
        """Open a stream for a request, before the request is submitted.

        Returns False if `max_streams` are open, or if the owner has a quarter of them.
        """
        with self._lock:
            if len(self._open) >= self._max_streams or self._owners[owner] >= max(self._max_streams // 4, 1):
                return False
            self._open[request_id] = put, asyncio.get_running_loop()
            self._owners[owner] += 1
        return True

    def close(self, request_id: RequestId, owner: str) -> None:
        """Close a stream. Idempotent."""
        with self._lock:
            if self._open.pop(request_id, None) is not None:
                self._owners -= Counter([owner])

    def read(self) -> None:
        """Read new tokens and put them into their streams.

        Called by the thread that notices commits of the engine.
        """
        if not self._open:
            return

        # A full page means that there may be more rows
        is_full = True
        while is_full:
            page = self._store.read(lambda tx: completions.list_partials(tx, self._position, _PAGE_SIZE))
            is_full = len(page) == _PAGE_SIZE
            new: dict[RequestId, list[Partial]] = {}
            for position, written in page:
                self._position = position
                new.setdefault(written.request_id, []).append(written)

            with self._lock:
                due = [(self._open[request_id], rows) for request_id, rows in new.items() if request_id in self._open]
            for (put, loop), rows in due:
                loop.call_soon_threadsafe(put, rows)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample finished. `stop_string` is the stop string that ended the sample, if any."""

    reason: Literal["stop", "length"]
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of sample `index`.

    Shapes: token_ids int32 [n], logprobs float32 [n], topk [n, k] if requested.

    `text` is the text that no later token can change. It may belong to earlier tokens, for example
    when the new tokens complete a character. `finish` is set in the last delta only.
    """

    index: int
    token_ids: Int32Array
    logprobs: Float32Array
    topk: TopK | None
    text: str
    finish: Finish | None = None

    @property
    def size(self) -> int:
        """The number of log-probabilities."""
        return len(self.token_ids) * (1 if self.topk is None else 1 + self.topk.token_ids.shape[1])


async def run_off_loop(work: Callable[[], T], size: int) -> T:
    """Run `work` in a thread if it processes many tokens, else on the event loop.

    In both cases, other tasks of the event loop can run before the next call.
    """
    if size > _MAX_INLINE:
        return await run_in_threadpool(work)
    await asyncio.sleep(0)
    return work()


class _Sample:
    """The tokens of one sample that the client has received, and the text they make."""

    def __init__(self, text: SampleText) -> None:
        self.text = text
        self.sent: list[int] = []

    def count_known(self, start: int, tokens: Int32Array) -> int | None:
        """Return how many of `tokens`, which begin at index `start`, were sent already.

        Returns None if tokens before `start` are missing. Raises ApiError 500 if different tokens
        were sent.
        """
        # The engine could not write some of the tokens. They come with the result.
        if start > len(self.sent):
            return None

        known = min(len(self.sent) - start, len(tokens))
        if self.sent[start : start + known] != tokens[:known].tolist():
            raise ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the engine was restarted and sampled different tokens than it had streamed before; "
                "send the request again",
            )
        return known


class Generation:
    """A submitted sample request.

    The caller iterates over `deltas` to the end, or calls `close` to cancel it.
    """

    def __init__(
        self, context: ApiContext, caller: Principal, request_id: RequestId, streams: PartialStreams | None
    ) -> None:
        """Subscribe to a request before it is stored, so that no result is missed.

        New tokens are read from `streams`, if it is given and has space.
        """
        self.request_id = request_id
        self.num_tokens = 0
        """Number of tokens sampled so far, over all samples."""
        self.prompt_result = PromptResult()
        """Results about the prompt. Empty until the request is complete."""
        self._context = context
        self._caller = caller
        self._samples: list[_Sample] = []
        self._waiting: deque[Partial] = deque()
        """New tokens that the engine wrote while the request runs."""
        self._changed = asyncio.Event()
        """Set when there is a result, and when there are new tokens."""
        self._is_over = False

        with ExitStack() as stack:
            self._completed = stack.enter_context(context.results.subscribe(request_id, caller.key_id))
            self._completed.add_done_callback(lambda _: self._changed.set())
            self.is_streamed = streams is not None and streams.open(request_id, caller.owner, self._put)
            """Whether the engine has to write new tokens while the request runs."""
            if streams is not None and self.is_streamed:
                stack.callback(streams.close, request_id, caller.owner)
            self._resources = stack.pop_all()

    def begin(self, texts: Sequence[SampleText]) -> None:
        """Continue after the request was stored. `texts` are the texts of its samples, which are still empty."""
        self._samples = [_Sample(text) for text in texts]

    def _put(self, new: Sequence[Partial]) -> None:
        self._waiting.extend(new)
        self._changed.set()

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield the deltas of all samples. The deltas of one sample are in order.

        Raises ApiError on failure.
        """
        try:
            while not self._is_over:
                poll_at = time.monotonic() + _POLL_INTERVAL_S
                if await self.wait_for_change(_POLL_INTERVAL_S):
                    self._changed.clear()

                # Tokens that the engine wrote while the request runs
                while self._waiting:
                    written = self._waiting.popleft()
                    known = self._samples[written.sample_index].count_known(written.start, written.tokens)
                    if known is not None and known < len(written.tokens):
                        yield self._make_delta(written.sample_index, written, first=known)

                # The result
                if self._completed.done() or time.monotonic() >= poll_at:
                    output = await self._read_output()
                    for index, sequence in enumerate([] if output is None else output.sequences):
                        yield await run_off_loop(partial(self._finish, index, sequence), len(sequence.tokens))
        finally:
            self.close()

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait for new tokens or the result. Returns False after `timeout_s` seconds.

        If the request is still queued and its owner has used up a quota meanwhile, the request is
        cancelled and ApiError 429 is raised.
        """
        ends_at, may_be_queued = time.monotonic() + timeout_s, self.num_tokens == 0
        while not self._changed.is_set() and (rest_s := ends_at - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(rest_s, _CHECK_QUOTA_EVERY_S) if may_be_queued else rest_s):
                    await self._changed.wait()
            except TimeoutError:
                may_be_queued = may_be_queued and await self._check_quota()
        return self._changed.is_set()

    async def _check_quota(self) -> bool:
        """Cancel a queued request, and raise ApiError 429, if its owner has used up a quota.

        Returns False if the owner has used up a quota, but the request was started before.
        """
        context, owner = self._context, self._caller.owner
        report = await context.engine.get_report_within(_CHECK_QUOTA_EVERY_S)
        pause = find_sample_pause(report.pauses, owner)
        if pause is None:
            return True
        failure = codec.encode(Failure(message=pause.reason, category=ErrorCategory.USER))

        def cancel_queued(tx: Session) -> bool:
            is_queued = engine_state.find_wait_reason(tx, self.request_id, [pause]) is not None
            if is_queued:
                self._cancel(tx, failure)
            return is_queued

        if not await context.run_call(owner, context.store.write, cancel_queued):
            return False
        self._is_over = True
        self.release()
        raise make_refusal(pause)

    def _make_delta(self, index: int, sampled: Partial | SampledSequence, *, first: int) -> Delta:
        """Return the tokens from `first` on, which were not sent yet."""
        sample, new, topk = self._samples[index], sampled.tokens[first:], sampled.topk
        sample.sent += new.tolist()
        self.num_tokens += len(new)
        if topk is not None:
            topk = TopK(token_ids=topk.token_ids[first:], logprobs=topk.logprobs[first:])
        text = sample.text.feed(new.tolist())
        return Delta(index=index, token_ids=new, logprobs=sampled.logprobs[first:], topk=topk, text=text)

    def _finish(self, index: int, sequence: SampledSequence) -> Delta:
        """Return the last delta of a complete sample: everything that was not sent yet."""
        sample = self._samples[index]
        # If more tokens were sent than the result has, the padding makes `count_known` raise
        padded = np.pad(sequence.tokens, (0, max(0, len(sample.sent) - len(sequence.tokens))), constant_values=-1)
        delta = self._make_delta(index, sequence, first=sample.count_known(0, padded) or 0)

        # The rest of the text, and why the sample ended
        text = delta.text + sample.text.finish()
        matched = sample.text.stop_string
        reason = "stop" if matched is not None else sequence.stop_reason
        return replace(delta, text=text, finish=Finish(reason, matched))

    async def _read_output(self) -> SampleOutput | None:
        """Return the result, or None while the request is open.

        Raises ApiError if the request failed, the API key was revoked, or the server is shutting
        down.
        """
        store, owner = self._context.store, self._caller.owner

        def read() -> tuple[futures.FutureState, object]:
            state = store.read(lambda tx: futures.get_state(tx, self.request_id, owner))
            return state, None if state.result is None else codec.decode(state.result)

        async with self._context.shares.result_readers.reserve(owner):
            state, result = await run_in_threadpool(read)

        # No result yet
        if state.status == "open":
            if self._context.results.is_closed:
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down; try again", _RETRY_HEADERS)
            if self._completed.done() and not self._completed.result():
                raise ApiError(HTTPStatus.UNAUTHORIZED, "X-API-Key: the key was revoked or has expired")
            return None

        # The request is over: it has failed or is complete. A client that is slow to read the rest
        # needs no stream.
        self._is_over = True
        self.release()
        if result is None:
            raise ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the result of request {self.request_id} was deleted or is damaged; send the request again",
            )
        self._context.results.mark_fetched(self.request_id)
        if isinstance(result, Failure):
            is_user = result.category is ErrorCategory.USER
            status = HTTPStatus.BAD_REQUEST if is_user else HTTPStatus.INTERNAL_SERVER_ERROR
            raise ApiError(status, result.message, field=result.field or None)
        assert isinstance(result, SampleOutput)
        self.prompt_result = result.prompt
        return result

    def release(self) -> None:
        """Release the subscription and the stream. Idempotent."""
        self._resources.close()

    def close(self) -> None:
        """Release the subscription, and cancel the request unless it is complete.

        Idempotent; never blocks.
        """
        self.release()
        if self._is_over:
            return
        self._is_over = True
        failure = codec.encode(CANCELLED)
        self._context.store.write_soon(lambda tx: self._cancel(tx, failure))

    def _cancel(self, tx: Session, failure: bytes) -> None:
        completions.cancel(tx, self.request_id, self._caller.owner, failure, time.time())
        # No client will fetch the result, so it need not be kept
        futures.mark_fetched(tx, [self.request_id], time.time())
        completions.delete_partials(tx, self.request_id)


async def wait_for_first_change(generations: Sequence[Generation], timeout_s: float) -> None:
    """Wait until one generation has tokens or a result, for at most `timeout_s` seconds.

    Raises ApiError 429 if a quota that was used up meanwhile pauses one of them.
    """
    waiting = [asyncio.create_task(generation.wait_for_change(timeout_s)) for generation in generations]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def merge_deltas(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta]]:
    """Yield deltas of multiple generations as they arrive, with the index of the generation."""
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    queue.put_nowait((number, delta))
                    await asyncio.sleep(0)  # many deltas may be there already, and other calls need the event loop too
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    # One task per generation fills the queue. None marks the end of a generation.
    tasks = [asyncio.create_task(pump(number, generation)) for number, generation in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def find_sample_pause(pauses: Collection[Pause], owner: str) -> Pause | None:
    """Return the pause of an owner's samples, or None if the owner's quota is not used up."""
    return next(
        (
            pause
            for pause in pauses
            if pause.limit == "sample_tokens_per_day" and (pause.subject_kind, pause.subject) == ("owner", owner)
        ),
        None,
    )


def make_refusal(pause: Pause) -> ApiError:
    """Return the error 429 for a call that would have to wait until the end of a pause."""
    # Without this `X-Should-Retry`, the OpenAI and Anthropic clients would retry until the quota is
    # reset at the end of the day
    headers = {"Retry-After": "60", "X-Should-Retry": "false"}
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, pause.reason, headers, reason="quota")
