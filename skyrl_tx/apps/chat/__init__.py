"""Endpoints compatible with the OpenAI and Anthropic APIs.

They turn text into sample requests, and samples into text.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from skyrl_tx.launch.command import App

if TYPE_CHECKING:
    from skyrl_tx.server.context import ServerExtension
    from skyrl_tx.server.settings import ApiSettings


def _extend_server() -> ServerExtension:
    from skyrl_tx.apps.chat.reply import convert_error_response
    from skyrl_tx.apps.chat.routes import ANTHROPIC_PREFIX, OPENAI_PREFIXES, create_routers
    from skyrl_tx.apps.chat.service import ChatService
    from skyrl_tx.server.context import ServerExtension

    openai_forms = {f"{prefix}/": partial(convert_error_response, "openai") for prefix in OPENAI_PREFIXES}
    return ServerExtension(
        routers=create_routers(),
        service=ChatService,
        error_forms=openai_forms | {f"{ANTHROPIC_PREFIX}/": partial(convert_error_response, "anthropic")},
    )


def _check_settings(settings: ApiSettings) -> None:
    if settings.chat_template is None:
        return
    from skyrl_tx.apps.chat.template import read_checked_template
    from skyrl_tx.contract.errors import ServerError
    from skyrl_tx.process.setup import CannotServe

    try:
        read_checked_template(settings.chat_template)
    except ServerError as error:
        raise CannotServe(f"--chat-template {error}") from error


CHAT = App(name="chat", check_settings=_check_settings, server=_extend_server)
