"""Runs in the database as the product recorded them, for pages that show curves.

`quickstart.json` is from a `skyrl-tx quickstart` of 60 supervised and 12 RL steps on a CPU: supervised training, then
reinforcement learning whose ratios differ from 1 by less than 1e-7.
"""

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlmodel import Session

from skyrl_tx.apps.history import logged_metrics, points
from skyrl_tx.apps.history.logged_metrics import CLIENT_RUN, LoggedRun, NewLoggedPoint
from skyrl_tx.apps.history.points import Point, SampleTotals
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.store import sessions
from skyrl_tx.store.tables import ModelRow

RECORDED: dict[str, list[Any]] = json.loads((Path(__file__).parent / "quickstart.json").read_text())
_POINT = ("position", "kind", "step", "created_at", "started_at", "at", "device_s", "tokens", "datums", "values")
_TIMES = ("created_at", "started_at", "at")
_SAMPLED = ("step", "samples", "cut", "tokens", "scored_tokens", "logprob_sum")
_POSITIONS = itertools.count(1_000_000, 1000)
FIRST_RL_STEP = 60


def make_points(model_id: ModelId, first_step: int = 0, *, position: int = 0, start: float = 0.0) -> list[Point]:
    """Return what the server recorded of the quickstart, from a step on."""
    fields = [dict(zip(_POINT, values, strict=True)) for values in RECORDED["points"]]
    moved = [
        row | {name: start + row[name] for name in _TIMES} | {"position": position + row["position"]} for row in fields
    ]
    return [Point(model_id=model_id, **row) for row in moved if row["step"] >= first_step]


def add_run(tx: Session, owner: str, name: str | None) -> ModelId:
    """Add a run without points, whose session has ended."""
    session_id = sessions.create(tx, owner=owner, now=time.time() - 600, display_name=name)
    tx.flush()
    model_id = ModelId(f"{session_id}:train:0")
    row = ModelRow(
        model_id=model_id,
        session_id=session_id,
        base_model="tiny",
        spec=codec.encode(ModelSpec(lora=LoraSpec(rank=32, seed=0))),
        status="unloaded",
        created_at=time.time() - 600,
        last_request_at=time.time() - 60,
    )
    tx.add(row)
    tx.flush()
    return model_id


def add_points(tx: Session, model_id: ModelId, owner: str, first_step: int = 0) -> None:
    """Add the points of `make_points`, and the sums over samples."""
    for point in make_points(model_id, first_step, position=next(_POSITIONS), start=time.time() - 600):
        points.add(tx, point)
    for values in RECORDED["sampled"]:
        points.add_sampled(tx, model_id, owner, SampleTotals(**dict(zip(_SAMPLED, values, strict=True))))


def log_metrics(tx: Session, model_id: ModelId, owner: str, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
    """Add pairs of step and metrics, as a client logs them without a logger."""
    run = LoggedRun(owner=owner, project="", key=model_id, name=CLIENT_RUN, model_id=model_id)
    row = logged_metrics.open_run(tx, run, time.time())
    new = [NewLoggedPoint(log_id=str(number), step=step, values=values) for number, (step, values) in enumerate(rows)]
    logged_metrics.add_points(tx, row, new, time.time())


def add_quickstart(tx: Session, owner: str) -> ModelId:
    """Add the whole run of the quickstart, with its logged metrics."""
    model_id = add_run(tx, owner, "quickstart")
    add_points(tx, model_id, owner)
    log_metrics(tx, model_id, owner, [(step, values) for step, _, values in RECORDED["logged"]])
    return model_id
