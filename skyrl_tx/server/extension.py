"""The parts of an optional feature in the API process."""

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

ErrorForm: TypeAlias = Callable[[Response, Exception], Response]
"""Turns the response to an error, whose body is `{"detail": text}`, into the form of another API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExtension:
    """Routers, pages and error forms of one feature."""

    routers: Sequence[APIRouter] = ()
    """Routers with their own prefixes, for example `APIRouter(prefix="/v1")`.

    They are matched after the routers of the server, and before the refusal of unknown paths below `/api/v1`.
    """
    pages: Callable[[ApiContext], Sequence[BaseRoute]] | None = None
    """Returns routes outside the OpenAPI document, such as web pages. They are matched last."""
    service: Callable[[ApiContext], object] | None = None
    """Creates the component that the endpoints of the feature share: `app.state.NAME`, by the name of the app."""
    error_forms: Mapping[str, ErrorForm] = field(default_factory=dict[str, ErrorForm])
    """The form of errors by the beginning of the path, for example of all paths that start with `/v1/`."""
    admission: Callable[[Session, SessionId, float], None] | None = None
    """Called at a time in the transaction that adds a checkpoint to a session; raises UserError to refuse it."""
    on_telemetry: Callable[[ApiCall], None] | None = None
    """Receives each call of `/telemetry`, in a thread, before it is acknowledged."""
    describe_session: Callable[[ApiCall, Request, SessionId], str | None] | None = None
    """Returns a line that the SDK shows to who creates a session, for example the address of the session's page."""
