"""OpenAI's list of models: the names that clients may send as `model`."""

from fastapi import Response

from skyrl_tx.apps.chat import calls
from skyrl_tx.apps.chat.resolve import listed, resolve
from skyrl_tx.apps.chat.responses import json_response
from skyrl_tx.server.context import Call, Incoming


def list_models(call: Incoming) -> Response:
    """List the served names, and the caller's sampler checkpoints, the newest first."""
    rows = call.store.read(lambda tx: listed(tx, call.caller))
    names = [_described(call, name, calls.STARTED_AT) for name in call.settings.offered_names]
    saved = [_described(call, str(row.path), int(row.created_at)) for row in rows]
    return json_response({"object": "list", "data": [*names, *saved]})


def get_model(call: Incoming, model_id: str) -> Response:
    """Describe one model; 404 for a name that `model` may not have."""
    weights = call.store.read(lambda tx: resolve(tx, call.caller, call.settings, model_id))
    return json_response(
        _described(call, model_id, calls.STARTED_AT, None if weights.path is None else str(weights.path))
    )


def _described(call: Call, name: str, created: int, path: str | None = None) -> dict[str, object]:
    made: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "skyrl_tx"}
    return made if path is None else made | {"root": path, "parent": call.settings.public_model_name}
