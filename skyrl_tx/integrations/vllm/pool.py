"""Which server draws a sample: prompts that begin alike go to the same one, up to its share of all samples."""

from collections.abc import Sequence
from hashlib import blake2b

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.integrations.vllm.server import VllmServer

_PREFIX_TOKENS = 256
"""The turns of a conversation usually share these, and the server keeps what it computed of them."""
_OVERLOAD = 1.25
"""A server may have this multiple of the mean number of open samples."""


def affinity(request: SampleRequest) -> bytes:
    """Return a key that requests share whose computed prompts may help each other."""
    start = request.prompt[:_PREFIX_TOKENS].tobytes()
    return blake2b(f"{request.sampler}|{request.cache_scope}|".encode() + start, digest_size=16).digest()


def choose(servers: Sequence[VllmServer], key: bytes) -> VllmServer:
    """Return the server of a new sample.

    Rendezvous hashing with bounded loads (Mirrokni et al. 2016, arXiv:1608.01350). Servers that were lost a moment ago
    come last.
    """
    bound = _OVERLOAD * (sum(server.num_open for server in servers) + 1) / len(servers)

    def rank(server: VllmServer) -> tuple[bool, bool, bytes]:
        own = blake2b(server.url.encode(), key=key, digest_size=8).digest()
        return server.is_down, server.num_open + 1 > max(bound, 1), own

    return min(servers, key=rank)
