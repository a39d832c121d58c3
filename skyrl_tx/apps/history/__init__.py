"""The history of training runs: curves, kept samples, clients' metrics, and traces of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_tx.launch.command import App

if TYPE_CHECKING:
    from skyrl_tx.engine.extension import EngineExtension
    from skyrl_tx.server.context import ServerExtension


def _extend_server() -> ServerExtension:
    from skyrl_tx.apps.history import client_metrics, hints, logged_metrics, routes, trackio
    from skyrl_tx.server.context import ServerExtension

    return ServerExtension(
        routers=(routes.router, trackio.router),
        count_stored_bytes=logged_metrics.count_stored_bytes,
        on_telemetry=client_metrics.keep_telemetry,
        describe_session=lambda call, _, session_id: call.store.read(
            lambda tx: hints.describe_last_run(tx, call.caller.owner, session_id)
        ),
    )


def _extend_engine() -> EngineExtension:
    from skyrl_tx.apps.history.observer import EXTENSION

    return EXTENSION


HISTORY = App(name="history", server=_extend_server, engine=_extend_engine)
