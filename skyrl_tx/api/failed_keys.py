"""A limit for wrong API keys from one network, so that guessing them costs the server next to nothing."""

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_FORGIVE_S = 3.0
"""Seconds after which one wrong key is forgiven."""
_MAX_NETWORKS = 10_000
_IPV6_PREFIX = 64
"""A customer gets at least that many IPv6 addresses."""


class FailedKeys:
    """Counts wrong keys per network: a token bucket of `limit` failures, one refilled every three seconds.

    A `limit` of 0 counts nothing. Of the networks beyond 10,000 the least recently recorded are forgotten.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._forgiven_at: OrderedDict[str, float] = OrderedDict()
        """When the bucket of a network is full again."""

    def wait_s(self, address: str) -> float:
        """Return in how many seconds another failure is allowed; 0 if it is allowed now."""
        if not self._limit:
            return 0.0
        with self._lock:
            left_s = self._forgiven_at.get(_network(address), 0.0) - self._clock()
        return max(0.0, left_s - (self._limit - 1) * _FORGIVE_S)

    def record(self, address: str) -> None:
        """Record a wrong key."""
        network, now = _network(address), self._clock()
        with self._lock:
            self._forgiven_at[network] = max(now, self._forgiven_at.pop(network, now)) + _FORGIVE_S
            if len(self._forgiven_at) > _MAX_NETWORKS:
                self._forgiven_at.popitem(last=False)


def _network(address: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, or no address
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
