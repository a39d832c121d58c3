"""Sampled sequences that are kept for people to read, with what training made of them.

A group is the samples of one request, and is kept or removed as a whole. Of each step, the groups with the smallest
request ids are kept. Request ids are hashes, so the choice is even and independent of order, and a crash does not
change it.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, bindparam, delete, func, insert, select, update
from sqlmodel import Session, col

from skyrl_tx.apps.history.tables import KeptSampleRow
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store.database import Store, execute, execute_in_batches, is_in_batch
from skyrl_tx.store.sampling_sessions import Origin

MAX_ROWS = 1000
_MAX_STEPS = 256
"""Steps whose choice is in memory; others are read again."""
_PERIOD_S = 3600
"""Samples whose step is unknown, such as those of base weights, are chosen among those of as much time."""
_TOKENS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSample:
    """One sequence of a group: tokens int32 [T], logprobs float32 [T]."""

    sequence_id: str
    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: str
    trainer_gap: float | None = None
    """The mean in nats; None if the sample was not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """The samples of one request, in index order; see `KeptSampleRow` for the fields. `prompt` is int32 [P]."""

    request_id: RequestId
    model_id: str
    step: int | None
    owner: str
    prompt: Int32Array
    samples: Sequence[NewSample]

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        return 4 * self.prompt.size + sum(8 * sample.tokens.size for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSequence:
    """The result of a pass for one sampled sequence; None where the pass has no such input."""

    sequence_id: str
    advantage: float | None
    kl: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One kept sequence: tokens int32 [T], logprobs float32 [T]."""

    sequence_id: str
    sample_index: int
    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: str
    trained_model_id: ModelId | None
    trained_step: int | None
    advantage: float | None
    kl: float | None
    trainer_gap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """The kept samples of one request, in index order. `prompt` is int32 [P]."""

    request_id: RequestId
    model_id: str
    step: int | None
    owner: str
    at: float
    prompt: Int32Array
    samples: tuple[KeptSample, ...]


_INSERT = insert(KeptSampleRow)
_DELETE = delete(KeptSampleRow).where(is_in_batch(col(KeptSampleRow.sequence_id)))
_DELETE_GROUPS = delete(KeptSampleRow).where(is_in_batch(col(KeptSampleRow.request_id)))


def add(tx: Session, group: NewGroup, now: float) -> None:
    """Insert the samples of a group; they replace those with the same ids."""
    common = {
        "request_id": group.request_id,
        "model_id": group.model_id,
        "step": group.step,
        "owner": group.owner,
        "at": now,
    }
    rows: list[dict[str, object]] = []
    for index, sample in enumerate(group.samples):
        arrays = {
            "prompt": b"" if index else np.ascontiguousarray(group.prompt, _TOKENS).tobytes(),
            "tokens": np.ascontiguousarray(sample.tokens, _TOKENS).tobytes(),
            "logprobs": np.ascontiguousarray(sample.logprobs, _LOGPROBS).tobytes(),
        }
        rows.append(
            {
                **common,
                **arrays,
                "sequence_id": sample.sequence_id,
                "sample_index": index,
                "num_bytes": sum(map(len, arrays.values())),
                "stop_reason": sample.stop_reason,
                "trainer_gap": sample.trainer_gap,
            }
        )
    execute_in_batches(tx, _DELETE, [sample.sequence_id for sample in group.samples])  # ids that are used again
    if rows:
        execute(tx, _INSERT, rows)


def remove(tx: Session, request_ids: Iterable[RequestId]) -> None:
    """Delete groups."""
    execute_in_batches(tx, _DELETE_GROUPS, request_ids)


_HAS_STEP = (
    (col(KeptSampleRow.model_id) == bindparam("model_id"))
    & col(KeptSampleRow.step).is_not_distinct_from(bindparam("step", type_=BigInteger))
    & (col(KeptSampleRow.at) >= bindparam("since"))
)


def list_groups_of_step(
    tx: Session, model_id: str, step: int | None, owner: str, since: float = 0.0
) -> list[RequestId]:
    """Return the groups that are kept of an owner's samples from one step of a model since a time."""
    wanted = select(col(KeptSampleRow.request_id)).distinct().where(_HAS_STEP, col(KeptSampleRow.owner) == owner)
    return list(execute(tx, wanted, {"model_id": model_id, "step": step, "since": since}).scalars())


_KEPT = select(col(KeptSampleRow.sequence_id)).where(
    is_in_batch(col(KeptSampleRow.sequence_id)), col(KeptSampleRow.owner) == bindparam("owner")
)
_TRAINED = (
    update(KeptSampleRow)
    .where(col(KeptSampleRow.sequence_id) == bindparam("name"))
    .values(
        trained_model_id=bindparam("by_model"),
        trained_step=bindparam("in_step"),
        advantage=bindparam("of_advantage"),
        kl=bindparam("of_kl"),
    )
)


def find_kept(tx: Session, owner: str, sequence_ids: Iterable[str]) -> set[str]:
    """Return those of an owner's sequences that are kept."""
    return {sequence_id for (sequence_id,) in execute_in_batches(tx, _KEPT, sequence_ids, owner=owner)}


def record_training(tx: Session, model_id: ModelId, step: int, trained: Iterable[TrainedSequence]) -> None:
    """Record the results of a pass for kept sequences, in place of those of earlier passes."""
    common = {"by_model": model_id, "in_step": step}
    rows = [{**common, "name": each.sequence_id, "of_advantage": each.advantage, "of_kl": each.kl} for each in trained]
    if rows:
        execute(tx, _TRAINED, rows)


def list_steps(tx: Session, model_id: str, owner: str | None, limit: int = 1000) -> list[tuple[int | None, int]]:
    """Return the newest steps of a model with kept samples and their number of groups, newest first.

    `owner` None means all owners. The step is None where it is unknown, and for base weights.
    """
    step = col(KeptSampleRow.step)
    count = func.count(col(KeptSampleRow.request_id).distinct())
    wanted = select(step, count).where(col(KeptSampleRow.model_id) == model_id).group_by(step)
    if owner is not None:
        wanted = wanted.where(col(KeptSampleRow.owner) == owner)
    return [(found, number) for found, number in execute(tx, wanted.order_by(step.desc().nulls_last()).limit(limit))]


def read_step(
    tx: Session,
    model_id: str,
    step: int | None,
    limit: int,
    *,
    owner: str | None,
    after: RequestId | None = None,
) -> list[KeptGroup]:
    """Return at most `limit` groups of one step of a model, by request id; `after` is the last one that was read.

    `owner` None means all owners; another one sees no group but its own. A step of None is that of base weights.
    """
    wanted = select(col(KeptSampleRow.request_id)).distinct().where(_HAS_STEP).order_by(col(KeptSampleRow.request_id))
    if owner is not None:
        wanted = wanted.where(col(KeptSampleRow.owner) == owner)
    if after is not None:
        wanted = wanted.where(col(KeptSampleRow.request_id) > after)
    parameters = {"model_id": model_id, "step": step, "since": 0.0}
    return read_groups(tx, list(execute(tx, wanted.limit(limit), parameters).scalars()), owner=owner)


_GROUP_ROWS = (
    select(*(getattr(KeptSampleRow, name) for name in KeptSampleRow.model_fields))
    .where(is_in_batch(col(KeptSampleRow.request_id)))
    .order_by(col(KeptSampleRow.request_id), col(KeptSampleRow.sample_index))
)


def read_groups(tx: Session, request_ids: Sequence[RequestId], *, owner: str | None) -> list[KeptGroup]:
    """Return those groups that are kept, by request id; `owner` None means any owner."""
    rows: dict[RequestId, list[Any]] = {}
    for row in execute_in_batches(tx, _GROUP_ROWS, request_ids):
        if owner is None or row.owner == owner:
            rows.setdefault(row.request_id, []).append(row)
    return [
        KeptGroup(
            request_id=request_id,
            model_id=samples[0].model_id,
            step=samples[0].step,
            owner=samples[0].owner,
            at=samples[0].at,
            prompt=np.frombuffer(samples[0].prompt, _TOKENS),
            samples=tuple(
                KeptSample(
                    sequence_id=row.sequence_id,
                    sample_index=row.sample_index,
                    tokens=np.frombuffer(row.tokens, _TOKENS),
                    logprobs=np.frombuffer(row.logprobs, _LOGPROBS),
                    stop_reason=row.stop_reason,
                    trained_model_id=row.trained_model_id,
                    trained_step=row.trained_step,
                    advantage=row.advantage,
                    kl=row.kl,
                    trainer_gap=row.trainer_gap,
                )
                for row in samples
            ),
        )
        for request_id, samples in rows.items()
    ]


def expire(tx: Session, before: float, *, limit: int = MAX_ROWS) -> int:
    """Delete samples that were drawn before a time; return their number. A group expires at once or in two calls."""
    old = select(col(KeptSampleRow.sequence_id)).where(col(KeptSampleRow.at) < before)
    old = old.order_by(col(KeptSampleRow.at), col(KeptSampleRow.request_id)).limit(limit)
    return execute(tx, delete(KeptSampleRow).where(col(KeptSampleRow.sequence_id).in_(old))).rowcount


def find_superfluous(tx: Session, model_id: str, owner: str, max_bytes: int) -> list[RequestId]:
    """Return the oldest groups of an owner and a model, without which the others take at most `max_bytes`."""
    at = func.max(col(KeptSampleRow.at))
    sizes = (
        select(col(KeptSampleRow.request_id), func.sum(col(KeptSampleRow.num_bytes)))
        .where(col(KeptSampleRow.model_id) == model_id, col(KeptSampleRow.owner) == owner)
        .group_by(col(KeptSampleRow.request_id))
        .order_by(at.desc(), col(KeptSampleRow.request_id))
    )
    total = 0
    found: list[RequestId] = []
    for request_id, num_bytes in execute(tx, sizes):
        total += int(num_bytes)
        if total > max_bytes:
            found.append(request_id)
    return found


def remove_runs(tx: Session, model_ids: Sequence[ModelId]) -> None:
    """Delete all samples from the weights of models."""
    execute_in_batches(tx, delete(KeptSampleRow).where(is_in_batch(col(KeptSampleRow.model_id))), model_ids)


@dataclass(frozen=True, slots=True)
class KeepDecision:
    """The decision about a new group. `replaced` is the group that it takes the place of."""

    is_kept: bool
    replaced: RequestId | None = None


_LEFT_OUT = KeepDecision(is_kept=False)


@dataclass(slots=True)
class KeptGroups:
    """The chosen groups of the latest steps."""

    store: Store
    max_groups: int
    """Groups of each step and owner."""
    _chosen: OrderedDict[tuple[str, Origin, int], list[RequestId]] = field(
        default_factory=OrderedDict[tuple[str, Origin, int], list[RequestId]]
    )

    def choose(self, owner: str, origin: Origin, request_id: RequestId, now: float) -> KeepDecision:
        """Decide about a group that is about to be written."""
        if not self.max_groups:
            return _LEFT_OUT
        chosen = self._read_chosen(owner, origin, now)
        if request_id in chosen:
            return KeepDecision(is_kept=True)
        replaced = None
        if len(chosen) >= self.max_groups:
            if request_id > chosen[-1]:
                return _LEFT_OUT
            replaced = chosen.pop()
        insort(chosen, request_id)
        return KeepDecision(is_kept=True, replaced=replaced)

    def _read_chosen(self, owner: str, origin: Origin, now: float) -> list[RequestId]:
        since = 0 if origin.step is not None else int(now) // _PERIOD_S * _PERIOD_S
        key = owner, origin, since
        if key not in self._chosen:
            if len(self._chosen) >= _MAX_STEPS:
                self._chosen.popitem(last=False)
            self._chosen[key] = sorted(
                self.store.read(lambda tx: list_groups_of_step(tx, origin.model_id, origin.step, owner, since))
            )
        self._chosen.move_to_end(key)
        return self._chosen[key]
