"""Endpoints that speak the APIs of OpenAI and Anthropic: text in, text out, on top of stored sample requests."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from skyrl_tx.launch.command import App

if TYPE_CHECKING:
    from skyrl_tx.server.context import ServerExtension


def _extend_server() -> ServerExtension:
    from skyrl_tx.apps.chat.errors import give_form
    from skyrl_tx.apps.chat.routes import ANTHROPIC_PREFIX, OPENAI_PREFIXES, create_routers
    from skyrl_tx.apps.chat.service import ChatService
    from skyrl_tx.server.context import ServerExtension

    openai_forms = {f"{prefix}/": partial(give_form, "openai") for prefix in OPENAI_PREFIXES}
    return ServerExtension(
        routers=create_routers(),
        service=ChatService,
        error_forms=openai_forms | {f"{ANTHROPIC_PREFIX}/": partial(give_form, "anthropic")},
    )


CHAT = App(name="chat", server=_extend_server)
