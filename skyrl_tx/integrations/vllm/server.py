"""HTTP client of vLLM servers.

`VllmServer` calls one server and turns its responses into results and errors. `ServerWatch` checks the health of all
servers in the background, so that operators hear of a lost server before a sample needs it.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx

from skyrl_tx.integrations.vllm import VllmConfig
from skyrl_tx.integrations.vllm.wire import read_error

_log = logging.getLogger(__name__)
_DOWN_S = 2.0
"""For this long after a failed call, samples prefer other servers."""
_OVERLOAD = 1.25
"""A server may have at most this multiple of the mean number of open samples."""
_MAX_LINE_BYTES = 16 * 2**20
_BROKEN_STATUSES = frozenset({502, 503, 504})
"""HTTP statuses that mean, for any call, that the server or a proxy before it is not ready."""
_LOST_STATUSES = _BROKEN_STATUSES | {500}
"""HTTP statuses that mean, for a sample, that the server is lost.

A server whose engine has ended answers samples with 500. When an adapter is loaded, 500 means that the adapter is bad.
"""


class ServerLost(Exception):
    """A server does not respond, or its response was cut off. The call may succeed later, or on another server."""


class Refused(Exception):
    """A server refuses a call, and would refuse it again."""


class AdapterMissing(Exception):
    """A server does not know an adapter, or has forgotten it."""


class VllmServer:
    """The calls to one server. Each call raises ServerLost, Refused or AdapterMissing."""

    def __init__(self, url: str, config: VllmConfig) -> None:
        """Must be called in the event loop. Does not connect yet."""
        headers = {"Authorization": f"Bearer {config.api_key.get_secret_value()}"} if config.api_key else {}
        timeout = httpx.Timeout(config.silence_timeout_s, connect=config.connect_timeout_s)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # `trust_env=False`: a proxy in the environment is for the internet, not for these servers.
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False, follow_redirects=False
        )

        self.url = url
        self._load_timeout_s = config.load_timeout_s
        self._loaded: set[str] = set()
        """The names of the adapters that the server has."""
        self._loading: dict[str, asyncio.Lock] = {}
        """A lock for each adapter, so that only one call loads it."""
        self._down_until = 0.0
        self._ping_timeout_s = config.connect_timeout_s
        self._lost_since: float | None = None
        self.lost_reason = ""
        """Why the last failed call failed, for example ConnectError."""
        self.num_open = 0
        """The number of samples that are open on this server."""

    @property
    def is_down(self) -> bool:
        """Whether a call has failed within the last two seconds."""
        return time.monotonic() < self._down_until

    @property
    def lost_s(self) -> float:
        """Seconds since calls began to fail; 0 if the last call succeeded. Any thread may read it."""
        since = self._lost_since
        return 0.0 if since is None else time.monotonic() - since

    async def ping(self) -> None:
        """Check that the server responds. Any status other than 502, 503 and 504 is accepted."""
        await self._call("GET", "/health", None, self._ping_timeout_s)

    async def close(self) -> None:
        """Close all connections, which ends the samples on the server."""
        await self._client.aclose()

    async def get(self, path: str, timeout_s: float) -> Any:
        """Return the JSON of a GET response."""
        return _parse_content(await self._call("GET", path, None, timeout_s))

    async def has_route(self, path: str) -> bool:
        """Return whether the server has a route.

        A route that exists refuses an empty body with an `error` in the response; a missing route has no `error`.
        """
        response = await self._call("POST", path, {}, None)
        return "error" in _parse_content(response)

    async def generate(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the whole response of `/inference/v1/generate`."""
        response = await self._call("POST", "/inference/v1/generate", body, None)
        self._check(response.status_code, response.text)
        return _parse_content(response)

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """Yield the lines of a streamed response of `/inference/v1/generate`."""
        try:
            async with self._client.stream("POST", "/inference/v1/generate", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    self._check(response.status_code, text)
                self._record_success()
                async for line in response.aiter_lines():
                    if len(line) > _MAX_LINE_BYTES:
                        raise Refused(f"a line of {len(line)} characters")
                    yield line
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._record_loss(error) from error

    async def ensure_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter unless this server has it already."""
        async with self._loading.setdefault(name, asyncio.Lock()):
            if name in self._loaded:
                return
            body = {"lora_name": name, "lora_path": str(directory)}
            response = await self._call("POST", "/v1/load_lora_adapter", body, self._load_timeout_s)
            if response.status_code != 200:
                message = read_error(response.text)
                # An earlier call whose response was lost may have loaded it.
                if response.status_code != 400 or "already been loaded" not in message:
                    raise Refused(f"the adapter cannot be loaded (HTTP {response.status_code}): {message}")
            self._loaded.add(name)

    def forget_adapter(self, name: str) -> None:
        """Record that the server does not have an adapter any more."""
        self._loaded.discard(name)

    async def drop_adapter(self, name: str) -> None:
        """Unload an adapter if this object has loaded it."""
        self._loading.pop(name, None)
        if name in self._loaded:
            self._loaded.discard(name)
            await self.unload_adapter(name)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter by name. It is no error if the server does not have it."""
        response = await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, self._load_timeout_s)
        if response.status_code not in (200, 404):
            raise Refused(f"the adapter cannot be unloaded: {read_error(response.text)}")

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._record_loss(error) from error
        if response.status_code in _BROKEN_STATUSES:
            raise self._record_loss(f"HTTP {response.status_code}: {read_error(response.text)}")
        self._record_success()
        return response

    def _record_success(self) -> None:
        self._down_until, self._lost_since = 0.0, None

    def _check(self, status: int, text: str) -> None:
        """Raise the error that a response of `/inference/v1/generate` means, unless it is a result."""
        if status == 200:
            return
        message = read_error(text)
        if status in _LOST_STATUSES:
            raise self._record_loss(f"HTTP {status}: {message}")
        if status == 404 and "does not exist" in message:
            raise AdapterMissing(message)
        raise Refused(f"HTTP {status}: {message}")

    def _record_loss(self, error: Exception | str) -> ServerLost:
        now = time.monotonic()
        self._down_until = now + _DOWN_S
        if self._lost_since is None:
            self._lost_since = now
        self.lost_reason = type(error).__name__ if isinstance(error, Exception) else error.partition(":")[0]
        if isinstance(error, httpx.TimeoutException):
            return ServerLost(f"vLLM at {self.url} did not respond in time ({type(error).__name__})")
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        return ServerLost(f"vLLM at {self.url} does not respond: {' '.join(reason.split())}")


class ServerWatch:
    """Checks the health of all servers every few seconds.

    `run` belongs to one event loop. The other methods may be called from any thread.
    """

    def __init__(self, servers: Sequence[VllmServer], config: VllmConfig) -> None:
        self._servers = servers
        self._lost_after_s = config.lost_after_s
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Check all servers until cancelled, and log when a server is lost and when it is back."""
        while True:
            await asyncio.gather(*map(self._check, self._servers))
            await asyncio.sleep(self._lost_after_s / 2)

    async def _check(self, server: VllmServer) -> None:
        try:
            await server.ping()
        except ServerLost as error:
            if self._is_lost(server) and server.url not in self._reported:
                self._reported.add(server.url)
                _log.error("%s (training continues)", error)
        except Exception as error:  # the next check may succeed
            _log.error("the health check of vLLM at %s failed", server.url, exc_info=error)
        else:
            if server.url in self._reported:
                self._reported.discard(server.url)
                _log.info("vLLM at %s is back", server.url)

    @property
    def num_lost(self) -> int:
        """The number of servers that have not responded for `lost_after_s`."""
        return len(self._list_lost())

    def describe(self) -> str | None:
        """Describe the lost servers; None if all respond. All users can read it, so it has no addresses."""
        lost, number = self._list_lost(), len(self._servers)
        if not lost:
            return None
        seconds = max(server.lost_s for server in lost)
        reason = f"for {seconds:.0f} s ({lost[0].lost_reason})"
        if number == 1:
            return f"vLLM has not responded {reason}"
        if len(lost) == number:
            return f"none of {number} vLLM servers has responded {reason}"
        return f"{len(lost)} of {number} vLLM servers have not responded {reason}; the other servers draw all samples"

    def _list_lost(self) -> list[VllmServer]:
        return [server for server in self._servers if self._is_lost(server)]

    def _is_lost(self, server: VllmServer) -> bool:
        return server.lost_s >= self._lost_after_s


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


def _parse_content(response: httpx.Response) -> Any:
    """Return the JSON of a response, or an empty mapping if it is not JSON."""
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
