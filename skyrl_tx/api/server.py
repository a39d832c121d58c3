"""The application on a socket."""

import socket
from typing import cast

import uvicorn
from fastapi import FastAPI

from skyrl_tx.api.app import create_app
from skyrl_tx.api.context import ApiContext
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.store.database import Store

_KEEP_ALIVE_S = 75
_BACKLOG = 4096


class ApiServer(uvicorn.Server):
    """A uvicorn server that lets go of its long polls before it waits for open calls to end."""

    def __init__(self, settings: ApiSettings, store: Store) -> None:
        self._app = create_app(settings, store)
        super().__init__(
            uvicorn.Config(
                self._app,
                host=settings.host,
                port=settings.port,
                access_log=False,
                log_config=None,
                backlog=_BACKLOG,
                http="httptools",
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    @property
    def app(self) -> FastAPI:
        """The application that is served."""
        return self._app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, on sockets that send each piece of an answer at once; connections inherit it from their listener.

        asyncio sees to that for sockets of its own making only. Without it the body of an answer waits until the client
        has acknowledged the head, which a client delays by 40 ms.
        """
        for listener in sockets or []:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the long polls, then everything else."""
        cast(ApiContext, self._app.state.context).waiters.release()
        await super().shutdown(sockets)
