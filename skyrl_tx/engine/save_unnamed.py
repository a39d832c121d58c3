"""An unnamed save: a sampling session that can be used before anything is written."""

import time

from sqlmodel import Session

from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import SaveWeightsOutput
from skyrl_tx.engine.answers import Answer
from skyrl_tx.engine.recovery import sampler_of
from skyrl_tx.engine.room import Room
from skyrl_tx.engine.work import Work
from skyrl_tx.store import samplers
from skyrl_tx.store.tables import SamplingSessionRow


def save_unnamed(room: Room, work: Work, request: SaveWeights) -> None:
    """Freeze a model's weights as a sampler, answer, and begin to write its files."""
    name, model_id = request.sampling_session_id, work.model_id
    assert name is not None and model_id is not None
    if room.store.read(lambda tx: samplers.get(tx, name)) is not None:
        raise UserError(f"sampling_session_seq_id: {name} exists already")
    room.behind.check_room()
    room.models.ensure([model_id])
    sampler = sampler_of(work.request_id)
    snapshot = room.backend.capture(model_id, {StatePart.WEIGHTS})
    room.samplers.offer(sampler, snapshot, work.session_id)
    effect_order = room.models.get(model_id).next_effect()
    now = time.time()

    def rows(tx: Session) -> None:
        session = SamplingSessionRow(
            sampling_session_id=name,
            session_id=work.session_id,
            base_model=room.settings.base_models[0],
            sampler_id=sampler,
            model_id=model_id,
            created_at=now,
            last_used_at=now,
            request_id=work.request_id,
            is_inflight=request.is_inflight,
        )
        samplers.create_session(tx, session)
        if request.is_inflight:
            samplers.follow(tx, model_id, sampler)

    result = SaveWeightsOutput(kind=request.kind, sampling_session_id=name)
    room.answers.give([Answer(work=work, result=result, effect_order=effect_order)], rows)
    room.behind.add(sampler, model_id, effect_order, snapshot)
