"""Sums over the samples from the weights of each optimizer step: length, cut ones, log-probability."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlmodel import Session, col

from skyrl_tx.apps.history.tables import SampledStepRow
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import execute, execute_in_batches, is_in_batch
from skyrl_tx.store.prepared import Prepared, adding_to_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """Sums over the samples from the weights of one step; see `SampledStepRow` for the fields."""

    step: int
    samples: int
    cut: int
    tokens: int
    scored_tokens: int
    logprob_sum: float


_NAMES = tuple(SampledStep.__dataclass_fields__)
_KEY = ("model_id", "step", "owner")
_SUMS = tuple(name for name in _NAMES if name not in _KEY)


_ADD = Prepared(adding_to_sums(SampledStepRow, _KEY, _SUMS), (*_KEY, *_SUMS))


def add(tx: Session, model_id: str, owner: str, sampled: SampledStep) -> None:
    """Add samples that an owner drew from a model's weights."""
    values = {name: getattr(sampled, name) for name in _NAMES}
    _ADD.execute(tx, {"model_id": model_id, "owner": owner, **values})


def of_model(
    tx: Session, model_id: ModelId, owner: str, *, after_step: int = -1, limit: int = 10_000
) -> list[SampledStep]:
    """Return the newest steps after one of which an owner drew samples, oldest first."""
    columns = tuple(getattr(SampledStepRow, name) for name in _NAMES)
    wanted = select(*columns).where(col(SampledStepRow.model_id) == model_id, col(SampledStepRow.owner) == owner)
    wanted = wanted.where(col(SampledStepRow.step) > after_step).order_by(col(SampledStepRow.step).desc()).limit(limit)
    rows: Sequence[Any] = execute(tx, wanted).all()
    return [SampledStep(**row._mapping) for row in reversed(rows)]


def remove_runs(tx: Session, model_ids: Sequence[ModelId]) -> None:
    """Delete all sums of models."""
    execute_in_batches(tx, delete(SampledStepRow).where(is_in_batch(col(SampledStepRow.model_id))), model_ids)
