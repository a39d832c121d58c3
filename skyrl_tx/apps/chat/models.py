"""Find the weights for the field `model` of the OpenAI and Anthropic endpoints."""

import time
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.errors import ApiError, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.routes.weights import parse_sampler_path
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import checkpoints
from skyrl_tx.store.tables import CheckpointRow

_SCHEME = "tinker://"
_MAX_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Weights:
    """A reference to weights: a sampler checkpoint, or the base model if `path` is None."""

    base_model: str
    path: CheckpointPath | None = None


def find_weights(call: ApiCall, name: str) -> Weights:
    """Return the weights that an API request names. `resolve_weights` lists the kinds of names."""
    return call.store.read(lambda tx: resolve_weights(tx, call.caller, call.settings, name))


def resolve_weights(tx: Session, caller: Principal, settings: ApiSettings, name: str) -> Weights:
    """Return the weights for a name.

    Raises ApiError 404 if they do not exist or the caller may not read them.

    There are four kinds of names:

    - a name of the served model, for example "Qwen/Qwen3-8B"
    - the `tinker://` path of a sampler checkpoint
    - both: the name of the served model, a semicolon, and the path
    - the id of a training run, for the newest sampler checkpoint of the run
    """
    base, _, path_text = name.rpartition(";")
    public = settings.public_model_name

    # A path, or a base model with a path
    if base:
        _resolve_base_model(settings, base)
    if path_text.startswith(_SCHEME):
        try:
            path = parse_sampler_path(path_text)
        except UserError as error:
            raise _no_model(name, settings, error.message) from error
        access.find_readable_checkpoint(tx, caller, path)
        return Weights(public, path)
    if base:
        raise _no_model(name, settings, f"{quote_value(path_text)} is not a tinker:// path")

    # The served model, or the id of a run, which contains `:train:`
    if ":train:" not in name:
        return Weights(_resolve_base_model(settings, name))
    run = access.find_readable_run(tx, caller, ModelId(name), time.time())
    sampler_rows = [row for row in run.checkpoints if row.kind == CheckpointKind.SAMPLER]
    if not sampler_rows:
        raise not_found(
            f"model {quote_value(name)}: the run has no sampler checkpoint; call save_weights_for_sampler to make one"
        )
    return Weights(public, sampler_rows[-1].path)


def _resolve_base_model(settings: ApiSettings, name: str) -> str:
    """Return the base model with this name. Raises ApiError 404 if this server does not serve it."""
    try:
        return settings.resolve_model_name(name)
    except UserError as error:
        raise _no_model(name, settings) from error


def _no_model(name: str, settings: ApiSettings, reason: str = "") -> ApiError:
    served = ", ".join(map(repr, settings.model_names))
    return not_found(
        f"model {quote_value(name)} does not exist{f': {reason}' if reason else ''}; this server accepts {served}, the "
        "id of a run, and the tinker:// path of a sampler checkpoint"
    )


def list_sampler_checkpoints(tx: Session, caller: Principal) -> list[CheckpointRow]:
    """Return the sampler checkpoints among the caller's newest 1000 checkpoints, newest first."""
    rows, _ = checkpoints.list_owned(tx, caller.owner, _MAX_LISTED, 0, time.time())
    return [row for row, _ in rows if row.kind == CheckpointKind.SAMPLER]
