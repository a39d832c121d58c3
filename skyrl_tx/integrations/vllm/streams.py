"""Draws each sample as a stream from a vLLM server. If the server is lost, the sample starts again on another server.

Samples whose prompts have the same beginning go to the same server, because its prefix cache then has this beginning.
If that server has too many open samples (see `_OVERLOAD`), a sample goes to another server.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from msgspec import structs

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.results import PromptResult, SampleDelta
from skyrl_tx.integrations.vllm import wire
from skyrl_tx.integrations.vllm.adapter_files import SamplerAdapter
from skyrl_tx.integrations.vllm.config import VllmConfig
from skyrl_tx.integrations.vllm.server import AdapterMissing, Refused, ServerLost, VllmServer
from skyrl_tx.integrations.vllm.wire import TokenChunk, WireError

_log = logging.getLogger(__name__)
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_PREFIX_TOKENS = 256
"""How many tokens at the start of a prompt choose its server. The turns of a conversation usually share them."""
_OVERLOAD = 1.25
"""A server may have at most this multiple of the mean number of open samples."""


class SampleFailed(Exception):
    """The sample cannot be drawn. The message is for the client."""


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
        self.num_restarts = 0
        """How many times samples were started again because a server was lost."""

    async def run(self, sample: RemoteSample) -> None:
        """Draw a sample to its end. If the sample fails, its last delta has the error."""
        try:
            await self._run(sample)
        except SampleFailed as error:
            self._emit(sample, sample.make_delta(error=str(error)))
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
                    raise SampleFailed(f"vLLM at {server.url} does not keep the adapter: {error}") from error
                has_reloaded = True
                continue
            except Refused as error:
                raise SampleFailed(f"vLLM at {server.url} refused the sample: {error}") from error
            except (ServerLost, WireError) as error:
                # The time without a server starts again after an attempt that brought new tokens.
                now = time.monotonic()
                if len(sample.tokens) > num_tokens:
                    lost_at, backoff_s, has_reloaded = 0.0, _BACKOFF_S, False
                lost_at = lost_at or now
                self._check_restart(sample, error, lost_s=now - lost_at)
                if sample.tokens:
                    sample.num_restarts += 1
                self.num_restarts += 1
            finally:
                server.num_open -= 1

            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _check_restart(self, sample: RemoteSample, error: Exception, *, lost_s: float) -> None:
        """Raise SampleFailed if a sample has waited too long for a server, or was started too often."""
        if sample.num_restarts >= self._config.max_restarts and sample.tokens:
            raise SampleFailed(f"the sample was started {sample.num_restarts + 1} times and did not end: {error}")
        if lost_s >= self._config.outage_timeout_s:
            raise SampleFailed(
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
                raise SampleFailed(
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


def choose_server(servers: Sequence[VllmServer], key: bytes) -> VllmServer:
    """Choose the server of a new sample.

    Uses rendezvous hashing with bounded loads (Mirrokni et al. 2016, arXiv:1608.01350). A server that has too many open
    samples is chosen only if all servers have too many or are down. A server that failed within the last two seconds
    is chosen only if all servers did.
    """
    bound = _OVERLOAD * (sum(server.num_open for server in servers) + 1) / len(servers)

    def get_rank(server: VllmServer) -> tuple[bool, bool, bytes]:
        digest = blake2b(server.url.encode(), key=key, digest_size=8).digest()
        return server.is_down, server.num_open + 1 > max(bound, 1), digest

    return min(servers, key=get_rank)
