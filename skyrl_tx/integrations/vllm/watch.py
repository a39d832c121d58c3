"""Asks servers now and then whether they are there, so that people know of a lost one before a sample needs it."""

import asyncio
import logging
from collections.abc import Sequence

from skyrl_tx.integrations.vllm.config import VllmConfig
from skyrl_tx.integrations.vllm.server import ServerLost, VllmServer

_log = logging.getLogger(__name__)


class ServerWatch:
    """The state of all servers. `run` belongs to one event loop; the rest may be called from any thread."""

    def __init__(self, servers: Sequence[VllmServer], config: VllmConfig) -> None:
        self._servers = servers
        self._lost_after_s = config.lost_after_s
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Ask all servers again and again, and log when one is lost and when it is back."""
        while True:
            await asyncio.gather(*map(self._ask, self._servers))
            await asyncio.sleep(self._lost_after_s / 2)

    async def _ask(self, server: VllmServer) -> None:
        try:
            await server.ping()
        except ServerLost as error:
            if self._is_lost(server) and server.url not in self._reported:
                self._reported.add(server.url)
                _log.error("%s; training goes on", error)
        except Exception as error:  # the next question may have an answer
            _log.error("vLLM at %s could not be asked", server.url, exc_info=error)
        else:
            if server.url in self._reported:
                self._reported.discard(server.url)
                _log.info("vLLM at %s is back", server.url)

    @property
    def num_lost(self) -> int:
        """The number of servers that have not responded for `lost_after_s`."""
        return len(self._lost())

    def describe(self) -> str | None:
        """Return which servers are lost, without their addresses: everybody may read it. None if all are there."""
        lost, number = self._lost(), len(self._servers)
        if not lost:
            return None
        seconds = max(server.lost_s for server in lost)
        reason = f"for {seconds:.0f} s ({lost[0].lost_reason})"
        if number == 1:
            return f"vLLM has not responded {reason}"
        if len(lost) == number:
            return f"none of {number} vLLM servers has responded {reason}"
        return f"{len(lost)} of {number} vLLM servers lost {reason}; others draw their samples"

    def _lost(self) -> list[VllmServer]:
        return [server for server in self._servers if self._is_lost(server)]

    def _is_lost(self, server: VllmServer) -> bool:
        return server.lost_s >= self._lost_after_s
