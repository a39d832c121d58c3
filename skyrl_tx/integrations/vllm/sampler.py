"""The sampler that draws samples on vLLM servers.

The engine calls `VllmSampler` from its thread. A second thread runs an event loop with one HTTP stream per sample, see
`Streams`. If a server is lost, its samples start again on another server.

Samples whose prompts have the same beginning go to the same server, because its prefix cache then has this beginning.
If that server has too many open samples, a sample goes to another server.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count, islice
from typing import Any, TypeVar

from msgspec import structs
from pydantic import BaseModel
from typing_extensions import override

from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import CapacityError, RequestError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PromptResult, SampleDelta
from skyrl_tx.contract.sampler import Sampler
from skyrl_tx.integrations.vllm import VllmConfig, VllmFlags, wire
from skyrl_tx.integrations.vllm.adapter_files import AdapterDirectory, SamplerAdapter, read_nesting
from skyrl_tx.integrations.vllm.managed_server import ManagedServer, find_command
from skyrl_tx.integrations.vllm.probe import probe
from skyrl_tx.integrations.vllm.server import (
    AdapterMissing,
    Refused,
    ServerLost,
    ServerWatch,
    VllmServer,
    choose_server,
)
from skyrl_tx.integrations.vllm.wire import TokenChunk, WireError
from skyrl_tx.process.signals import ServiceThread

_log = logging.getLogger(__name__)
_WAIT_S = 0.02
"""How long `step_sample` waits if no tokens have arrived. It is short, so that the engine can also train."""
_CLOSE_S = 5.0
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_PREFIX_TOKENS = 256
"""How many tokens at the start of a prompt choose its server. The turns of a conversation usually share them."""

T = TypeVar("T")
_Key = tuple[RequestId, int]


@dataclass(slots=True, eq=False)
class RemoteSample:
    """One sample, and the tokens that the engine has received so far."""

    request: SampleRequest
    index: int
    adapter: SamplerAdapter | None
    """None for samples of the base model."""
    tokens: list[int] = field(default_factory=list[int])
    num_restarts: int = 0
    """How often the sample was started again after it had tokens."""
    prompt: PromptResult | None = None
    task: "Future[None] | None" = None
    """The task that draws the sample."""

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probabilities of the prompt still have to be requested. Only the first sample does so."""
        return self.index == 0 and self.request.options.wants_prompt and self.prompt is None

    def make_delta(self, *, error: str | None = None) -> SampleDelta:
        """Return a delta without tokens."""
        return SampleDelta.make_empty(self.request.request_id, self.index, error=error)


class Streams:
    """Draws samples on servers, in one event loop."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        config: VllmConfig,
        emit: Callable[[RemoteSample, SampleDelta], None],
        *,
        base_model: str,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`emit` is called with each delta of a sample, which has new tokens or an error."""
        self._servers = servers
        self._config = config
        self._emit = emit
        self._base_model = base_model
        self._eos_token_ids = eos_token_ids

    async def run(self, sample: RemoteSample) -> None:
        """Draw a sample to its end. If the sample fails, its last delta has the error."""
        try:
            await self._run(sample)
        except RequestError as error:
            self._emit(sample, sample.make_delta(error=error.message))
        except OSError as error:
            self._emit(sample, sample.make_delta(error=f"the adapter cannot be written for vLLM: {error.strerror}"))
        except Exception as error:  # a bug that affects one sample must not affect other samples
            _log.error("a sample on vLLM failed", exc_info=error)
            self._emit(sample, sample.make_delta(error=f"internal error of the sampler: {type(error).__name__}"))

    async def _run(self, sample: RemoteSample) -> None:
        lost_at, backoff_s, has_reloaded = 0.0, _BACKOFF_S, False
        while True:
            # Try one server.
            num_tokens = len(sample.tokens)
            server = choose_server(self._servers, compute_affinity_key(sample.request))
            server.num_open += 1
            try:
                await self._run_on(server, sample)
                return
            except AdapterMissing as error:
                if has_reloaded:
                    raise UserError(f"vLLM at {server.url} does not keep the adapter: {error}") from error
                has_reloaded = True
                continue
            except Refused as error:
                raise UserError(f"vLLM at {server.url} refused the sample: {error}") from error
            except (ServerLost, WireError) as error:
                # The time without a server starts again after an attempt that brought new tokens.
                now = time.monotonic()
                if len(sample.tokens) > num_tokens:
                    lost_at, backoff_s, has_reloaded = 0.0, _BACKOFF_S, False
                lost_at = lost_at or now
                self._check_restart(sample, error, lost_s=now - lost_at)
                if sample.tokens:
                    sample.num_restarts += 1
            finally:
                server.num_open -= 1

            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _check_restart(self, sample: RemoteSample, error: Exception, *, lost_s: float) -> None:
        """Raise UserError if a sample has waited too long for a server, or was started too often."""
        if sample.num_restarts >= self._config.max_restarts and sample.tokens:
            raise UserError(f"the sample was started {sample.num_restarts + 1} times and did not end: {error}")
        if lost_s >= self._config.outage_timeout_s:
            raise UserError(
                f"no vLLM server could draw the sample for {lost_s:.0f} s: {error}; send the request again later"
            )
        _log.warning("restarting a sample after %d tokens: %s", len(sample.tokens), error)

    async def _run_on(self, server: VllmServer, sample: RemoteSample) -> None:
        # Make sure that the server has the adapter.
        request, adapter, model = sample.request, sample.adapter, self._base_model
        if adapter is not None:
            await server.ensure_adapter(adapter.name, await adapter.wait_for_directory())
            model = adapter.name

        # Request the log-probabilities of the prompt, if needed, and stream the sample.
        try:
            if sample.wants_prompt:
                content = await server.generate(wire.make_prompt_body(request, model=model))
                sample.prompt = wire.read_prompt_result(content, request.prompt, request.options)

            body = wire.make_sample_body(
                request,
                sample.index,
                model=model,
                eos_token_ids=self._eos_token_ids,
                stream_tokens=self._config.stream_tokens,
            )
            await self._follow(server, sample, body)
        except AdapterMissing:
            if adapter is not None:
                server.forget_adapter(adapter.name)
            raise

    async def _follow(self, server: VllmServer, sample: RemoteSample, body: dict[str, object]) -> None:
        """Emit the new tokens of a stream.

        A sample that was started again first repeats the tokens that the engine already has. They are compared and
        skipped.
        """
        num_repeated = 0
        async for line in server.stream(body):
            chunk = wire.read_event(line, sample.request.options.sample_topk)
            if chunk is None:
                continue

            # Compare repeated tokens.
            known = sample.tokens[num_repeated : num_repeated + chunk.tokens.size]
            if chunk.tokens[: len(known)].tolist() != known:
                raise UserError(
                    f"a vLLM server was lost after {len(sample.tokens)} tokens of the sample, and the same seed gave "
                    f"other tokens on {server.url}; send the request again"
                )
            num_repeated += chunk.tokens.size

            self._take(sample, chunk, skip=len(known))
            if chunk.stop_reason is not None:
                return
        raise ServerLost(f"vLLM at {server.url} closed the stream before the end of the sample")

    def _take(self, sample: RemoteSample, chunk: TokenChunk, skip: int) -> None:
        """Emit the tokens of a chunk except for the first `skip` tokens."""
        tokens = chunk.tokens[skip:]
        if not tokens.size and chunk.stop_reason is None:
            return
        topk = chunk.topk
        if topk is not None:
            topk = replace(topk, token_ids=topk.token_ids[skip:], logprobs=topk.logprobs[skip:])

        delta = structs.replace(
            sample.make_delta(),
            tokens=tokens,
            logprobs=chunk.logprobs[skip:],
            stop_reason=chunk.stop_reason,
            topk=topk,
            prompt=None if sample.tokens else sample.prompt,
        )
        sample.tokens.extend(tokens.tolist())
        self._emit(sample, delta)


def compute_affinity_key(request: SampleRequest) -> bytes:
    """Return a key that is equal for requests that can share a prefix cache: same weights, scope and first tokens."""
    start = request.prompt[:_PREFIX_TOKENS].tobytes()
    return blake2b(f"{request.sampler}|{request.cache_scope}|".encode() + start, digest_size=16).digest()


class VllmSampler(Sampler):
    """Samples on vLLM servers.

    The engine's thread owns the table of open samples. After a sample has left the table, tokens that its stream still
    delivers are dropped.
    """

    def __init__(self, base_model: str, config: BaseModel) -> None:
        assert isinstance(config, VllmFlags)
        self._base_model = base_model
        self._config = VllmConfig.complete(config)
        self._allows_filters = self._config.filtered_logprobs == "renormalized"
        self._managed_server: ManagedServer | None = None
        self._open: dict[_Key, RemoteSample] = {}
        self._adapters: dict[SamplerId, SamplerAdapter] = {}
        self._arrived: deque[tuple[RemoteSample, SampleDelta]] = deque()
        self._has_arrived = threading.Event()
        self._numbers = count()
        self._servers: list[VllmServer] = []
        self._loop: asyncio.AbstractEventLoop | None = None

        if self._config.url is None:
            find_command(self._config)  # raises before the trainer takes minutes to start

    @override
    def start(self, trainer: Capabilities) -> Capabilities:
        # Start a server if the operator named none.
        logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request at level INFO
        nesting = read_nesting(self._base_model)
        if nesting.prefix:
            _log.info("the base model's class has images, so vLLM gets adapters with modules %s…", nesting.prefix)
        self._directory = AdapterDirectory(self._config.adapter_dir, nesting)
        if self._config.url is None:
            try:
                self._managed_server = ManagedServer(self._config, self._base_model, trainer, self._directory.path)
            except UserError:
                self._directory.close()
                raise
            self._config = self._managed_server.config

        # Start the event loop, wait for the servers and check them.
        self._loop = asyncio.new_event_loop()
        self._thread = ServiceThread("vllm-streams", self._loop.run_forever)
        self._thread.start()
        self._servers = self._start(self._make_servers()).result()
        check = (lambda: None) if self._managed_server is None else self._managed_server.check
        checks = probe(self._servers, self._config, trainer, self._directory.is_abandoned, check)
        result = self._start(checks).result()
        if self._managed_server is not None:
            self._managed_server.was_ready = True

        # Be ready for samples, and keep checking the servers.
        self._streams = Streams(
            self._servers,
            self._config,
            self._receive,
            base_model=result.base_model,
            eos_token_ids=trainer.eos_token_ids,
        )
        self._watch = ServerWatch(self._servers, self._config)
        self._start(self._watch.run())
        self._allows_filters |= "raw" in result.capabilities.sampled_logprobs
        return result.capabilities

    @override
    def close(self) -> None:
        try:
            self._close_streams()
        finally:
            if self._managed_server is not None:
                self._managed_server.close()

    def _close_streams(self) -> None:
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._end(), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_CLOSE_S)
        loop.close()
        self._open.clear()
        self._directory.close()

    @override
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        # Another thread writes the files. A server loads them before its first sample with this adapter.
        if sampler not in self._adapters:
            if len(self._adapters) >= self._config.max_adapters:
                raise CapacityError(f"all {self._config.max_adapters} adapter slots of vLLM are taken")
            name = f"{self._directory.path.name}-{next(self._numbers)}"
            self._adapters[sampler] = adapter = SamplerAdapter(name, source, self._directory)
            self._start(self._write(adapter))

    @override
    def drop_sampler(self, sampler: SamplerId) -> None:
        adapter = self._adapters.pop(sampler, None)
        if adapter is not None:
            self._start(self._drop(adapter))

    @override
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        # Check all requests before the first one starts: vLLM does not support all sampling parameters.
        for request in batch.requests:
            wire.check_sample(request, allows_filters=self._allows_filters)
        for request in batch.requests:
            adapter = None if request.sampler is None else self._adapters[request.sampler]
            for index in range(request.first_index, request.first_index + request.num_samples):
                sample = RemoteSample(request=request, index=index, adapter=adapter)
                self._open[request.request_id, index] = sample
                sample.task = self._start(self._streams.run(sample))

    @override
    def step_sample(self) -> list[SampleDelta]:
        """Return all deltas that have arrived. If there are none, wait 20 ms for some."""
        if not self._open:
            return []
        self._has_arrived.wait(_WAIT_S)
        self._has_arrived.clear()

        deltas: list[SampleDelta] = []
        while self._arrived:
            sample, delta = self._arrived.popleft()
            key = delta.request_id, delta.index
            if self._open.get(key) is not sample:  # the sample was cancelled or has ended
                continue
            if delta.stop_reason is not None or delta.error is not None:
                del self._open[key]
            deltas.append(delta)
        return deltas or [sample.make_delta() for sample in islice(self._open.values(), 1)]

    @override
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        for key in [key for key in self._open if key[0] in request_ids]:
            self._end_stream(key)

    @override
    def end_sample(self, request_id: RequestId, index: int) -> None:
        if (request_id, index) in self._open:
            self._end_stream((request_id, index))

    @property
    @override
    def is_away(self) -> bool:
        return self._watch.num_lost == len(self._servers)

    @override
    def meters(self, trainer: Meters) -> Meters:
        return replace(
            trainer,
            outage=self._watch.describe(),
            sampler_servers=len(self._servers),
            sampler_servers_lost=self._watch.num_lost,
        )

    def _end_stream(self, key: _Key) -> None:
        """Remove a sample and close its stream. The server then stops drawing the sample."""
        if (task := self._open.pop(key).task) is not None:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # In the event loop

    def _receive(self, sample: RemoteSample, delta: SampleDelta) -> None:
        self._arrived.append((sample, delta))
        self._has_arrived.set()

    async def _make_servers(self) -> list[VllmServer]:
        return [VllmServer(url, self._config) for url in self._config.urls]

    async def _write(self, adapter: SamplerAdapter) -> None:
        try:
            await adapter.wait_for_directory()
        except (RequestError, OSError) as error:  # samples with the adapter try again, and report the error
            _log.warning("adapter %s cannot be written: %s", adapter.name, error)

    async def _drop(self, adapter: SamplerAdapter) -> None:
        """Unload an adapter from all servers and remove its files."""
        for server in self._servers:
            try:
                await server.drop_adapter(adapter.name)
            except (ServerLost, Refused) as error:
                _log.warning("could not unload adapter %s from %s: %s", adapter.name, server.url, error)
        await adapter.remove()

    async def _end(self) -> None:
        this = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not this]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.close()
