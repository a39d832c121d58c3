"""The sampler that draws samples on vLLM servers.

The engine calls `VllmSampler` from its thread. A second thread runs an event loop with one HTTP stream per sample.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from itertools import count, islice
from typing import Any, TypeVar

from pydantic import BaseModel
from typing_extensions import override

from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.batches import PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import CapacityError, RequestError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.contract.sampler import Sampler
from skyrl_tx.integrations.vllm import wire
from skyrl_tx.integrations.vllm.adapter_files import AdapterDirectory, SamplerAdapter, read_nesting
from skyrl_tx.integrations.vllm.config import VllmConfig, VllmFlags
from skyrl_tx.integrations.vllm.managed_server import ManagedServer, find_command
from skyrl_tx.integrations.vllm.probe import probe
from skyrl_tx.integrations.vllm.server import Refused, ServerLost, ServerWatch, VllmServer
from skyrl_tx.integrations.vllm.streams import RemoteSample, Streams
from skyrl_tx.process.signals import ServiceThread

_log = logging.getLogger(__name__)
_WAIT_S = 0.02
"""How long `step_sample` waits if no tokens have arrived. It is short, so that the engine can also train."""
_CLOSE_S = 5.0

T = TypeVar("T")
_Key = tuple[RequestId, int]


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
