"""The page of the playground: which models a visitor may try, and what the served model's template can."""

from collections.abc import Mapping
from typing import cast

from sqlmodel import Session

from skyrl_tx.apps.chat.models import Weights, list_checkpoints, resolve
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.apps.console.format import short_id
from skyrl_tx.apps.console.playground import MAX_SAMPLES
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.context import base_url
from skyrl_tx.store.tables import CheckpointRow

pages = PageTable()
_MAX_OFFERED = 200
"""Checkpoints in the menu; the others are named by path."""
_DEFAULT_MAX_TOKENS = 512


@pages.get("/playground")
def show_playground(visit: Visit) -> Page:
    """Show the playground, with the checkpoint or the run that the address names."""
    named = visit.query("checkpoint") or visit.query("run")
    settings = visit.context.settings

    def work(tx: Session) -> tuple[list[CheckpointRow], Weights | None]:
        found = resolve(tx, visit.caller, settings, named) if named else None
        return list_checkpoints(tx, visit.caller)[:_MAX_OFFERED], found

    rows, weights = visit.read(work)
    chat = cast(ChatService, visit.request.app.state.chat)
    limit = chat.limits.max_context_length
    setup = {
        "models": settings.offered_names,
        "checkpoints": [_option(row) for row in rows],
        "named": None if weights is None else str(weights.path or weights.base_model),
        "base_url": base_url(settings, visit.request),
        "form_token": visit.visitor.form_token,
        "may_sample": visit.visitor.may_change,
        "is_keyless": visit.visitor.is_keyless,
        "max_samples": MAX_SAMPLES,
        "max_tokens": _DEFAULT_MAX_TOKENS if limit is None else min(_DEFAULT_MAX_TOKENS, max(limit // 2, 1)),
        **_abilities(chat),
    }
    return Page("playground.jinja", {"setup": setup})


def _option(row: CheckpointRow) -> Mapping[str, object]:
    step = "" if row.step is None else f", step {row.step}"
    return {"path": str(row.path), "name": f"{short_id(row.model_id)} / {row.name}{step}"}


def _abilities(chat: ChatService) -> Mapping[str, bool]:
    """Return whether the model has a tokenizer, a chat template, and thinking that can be turned off."""
    try:
        template = chat.text.template.source
    except UserError:
        template = ""
    has_tokenizer = chat.text.has_tokenizer
    return {
        "has_tokenizer": has_tokenizer,
        "has_template": bool(template) and has_tokenizer,
        "has_thinking": "enable_thinking" in template,
    }
