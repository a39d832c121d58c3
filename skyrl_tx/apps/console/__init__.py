"""The web console: pages about runs, samples, checkpoints, sessions, keys and the server.

The server renders pages as HTML. Tables and forms work without JavaScript. With JavaScript, pages
update themselves and have charts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_tx.launch.command import App

if TYPE_CHECKING:
    from skyrl_tx.server.context import ServerExtension


def _extend_server() -> ServerExtension:
    from skyrl_tx.apps.console.site import create_routes, describe_session
    from skyrl_tx.server.context import ServerExtension

    return ServerExtension(
        pages=lambda context: [] if context.settings.no_console else create_routes(context),
        describe_session=describe_session,
    )


CONSOLE = App(name="console", server=_extend_server)
