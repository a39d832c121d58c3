"""How an optional feature extends the API process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sqlmodel import Session
from starlette.routing import BaseRoute

from skyrl_tx.contract.ids import SessionId

if TYPE_CHECKING:
    from skyrl_tx.server.context import ApiCall, ApiContext
    from skyrl_tx.server.stored_bytes import CountBytes

ErrorForm: TypeAlias = Callable[[Response, Exception], Response]
"""Converts an error response with the body `{"detail": text}` to the format of another API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExtension:
    """Routers, pages, error formats and callbacks of one optional feature."""

    routers: Sequence[APIRouter] = ()
    """Routers with their own prefixes, for example `APIRouter(prefix="/v1")`.

    They are matched after the server's own routers, and before the 404 for unknown paths below
    `/api/v1`.
    """
    pages: Callable[[ApiContext], Sequence[BaseRoute]] | None = None
    """Returns routes that are not part of the OpenAPI document, such as web pages. Matched last."""
    service: Callable[[ApiContext], object] | None = None
    """Creates the component that the endpoints of the feature share.

    The component is stored as `app.state.NAME`, where NAME is the name of the feature.
    """
    error_forms: Mapping[str, ErrorForm] = field(default_factory=dict[str, ErrorForm])
    """Error formats by path prefix. For example, `/v1/` stands for all paths that start with it."""
    admission: Callable[[Session, SessionId, float], None] | None = None
    """Called as `admission(tx, session_id, now)` before a checkpoint is added to a session.

    Runs in the transaction that adds the checkpoint. Raises UserError to refuse the checkpoint.
    """
    count_stored_bytes: CountBytes | None = None
    """Returns how many bytes each owner has in the tables of the feature.

    `StoredBytes` adds these bytes to the total of the owner, and refuses calls if the total is too
    large.
    """
    on_telemetry: Callable[[ApiCall], None] | None = None
    """Called with each request to `/telemetry`, in a thread, before the request is acknowledged."""
    describe_session: Callable[[ApiCall, Request, SessionId], str | None] | None = None
    """Returns a line for the SDK to print when it creates a session, such as a URL."""
