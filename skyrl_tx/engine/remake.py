"""Unnamed samplers that an engine's end kept from the disk, made again by the next one before it serves."""

import logging
from collections import defaultdict

from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.engine.recovery import sampler_of
from skyrl_tx.engine.room import ENDS_ENGINE, Room
from skyrl_tx.store import futures, samplers

_log = logging.getLogger(__name__)


def make_samplers_again(room: Room) -> None:
    """Bring back the models that made them: the replay makes them too.

    A replay is an attempt at the saves, like any other, so that one which takes engines down is given up.
    """
    lost: defaultdict[ModelId, dict[RequestId, SamplerId]] = defaultdict(dict)
    for unnamed in room.store.read(samplers.unnamed):
        if sampler_of(unnamed.request_id) == unnamed.sampler_id and not room.recovery.has_sampler(unnamed.sampler_id):
            lost[unnamed.model_id][unnamed.request_id] = unnamed.sampler_id
    for model_id in sorted(lost):
        _make_again(room, model_id, lost[model_id])


def _make_again(room: Room, model_id: ModelId, saves: dict[RequestId, SamplerId]) -> None:
    attempts = room.store.read(lambda tx: futures.attempts(tx, saves))
    if attempts >= room.settings.max_attempts:
        _give_up(room, model_id, saves, f"the engine ended {attempts} times while it made them again")
        return
    room.attempts.mark(saves)
    try:
        room.models.ensure([model_id])
    except ENDS_ENGINE:
        raise
    except RequestError as error:
        _give_up(room, model_id, saves, error.message)
    except Exception as error:  # whatever it is, it is this model's alone
        _log.exception("model %s cannot be brought back", model_id)
        _give_up(room, model_id, saves, f"internal error: {type(error).__name__}: {error}")
    room.attempts.give_back(saves)


def _give_up(room: Room, model_id: ModelId, saves: dict[RequestId, SamplerId], reason: str) -> None:
    _log.error("%d unnamed samplers of model %s are lost: %s", len(saves), model_id, reason)
    room.behind.give_up(saves.values(), f"its unnamed weights are lost: {reason}; save them anew to sample from them")
