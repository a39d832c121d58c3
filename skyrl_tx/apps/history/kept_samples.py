"""Choose and store sampled sequences that people can read in the console.

A group is the samples of one request. A group is kept or deleted as a whole. For each step, the
server keeps the groups with the smallest request ids. Request ids are hashes, so this is a uniform
random choice. The choice does not depend on the order in which requests complete, and is the same
after a crash.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, Index, String, bindparam, delete, func, insert, select, update
from sqlmodel import Field, Session, col

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store.database import Store, execute, execute_in_batches, is_in_batch
from skyrl_tx.store.sampling_sessions import Origin
from skyrl_tx.store.tables import AppTable

MAX_ROWS = 1000
_MAX_STEPS = 256
"""The chosen groups of this many steps are cached in memory.

The chosen groups of other steps are read from the database.
"""
_PERIOD_S = 3600
"""Samples without a step, for example from base weights, are chosen per hour, not per step."""
_TOKENS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


class KeptSampleRow(AppTable, table=True):
    """One sampled sequence that people can read in the console. Arrays are little-endian."""

    __tablename__ = "kept_samples"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_kept_samples_model", "model_id", "step"), Index("ix_kept_samples_at", "at"))

    sequence_id: str = Field(primary_key=True)
    request_id: RequestId = Field(index=True, sa_type=String)
    """The request that sampled the sequence. All samples of a request are one group."""
    sample_index: int
    """Index of the sample in its group."""
    model_id: str
    """The model whose weights were sampled, or empty for base weights."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """Number of optimizer steps in the sampled weights, if known."""
    owner: str
    """The owner of the request. Only the owner and admins can read the sample."""
    at: float
    num_bytes: int
    """Size of the arrays.

    This column is before the arrays, so that SQLite can read it without reading the arrays.
    """
    stop_reason: str
    trained_model_id: str | None = None
    """The model of the last pass that trained on the sequence, if any."""
    trained_step: int | None = Field(default=None, sa_type=BigInteger)
    """Number of optimizer steps of this model before that pass."""
    advantage: float | None = None
    """Mean advantage of the sampled tokens, in the last pass that trained on the sequence."""
    kl: float | None = None
    """Mean of the log-probability from sampling minus the log-probability from that pass."""
    trainer_gap: float | None = None
    """Mean absolute difference to the trainer's log-probabilities at the same weights, if known."""
    prompt: bytes
    """int32 [prompt length] in the first sample of a group, empty in all following samples."""
    tokens: bytes
    """int32 [completion length]."""
    logprobs: bytes
    """float32 [completion length]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One sampled sequence: tokens int32 [T], logprobs float32 [T].

    The other fields are explained in `KeptSampleRow`. A new sample has no results of training.
    """

    sequence_id: str
    tokens: Int32Array
    logprobs: Float32Array
    stop_reason: str
    trainer_gap: float | None = None
    trained_model_id: ModelId | None = None
    trained_step: int | None = None
    advantage: float | None = None
    kl: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """The samples of one request, in index order. `prompt` is int32 [P].

    The other fields are explained in `KeptSampleRow`.
    """

    request_id: RequestId
    model_id: str
    step: int | None
    owner: str
    prompt: Int32Array
    samples: Sequence[KeptSample]

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return 4 * self.prompt.size + sum(8 * sample.tokens.size for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSequence:
    """The result of a training pass for one sampled sequence.

    A value is None if the pass has no such input.
    """

    sequence_id: str
    advantage: float | None
    kl: float | None


_GROUP_NAMES = ("request_id", "model_id", "step", "owner")
_SAMPLE_NAMES = ("sequence_id", "stop_reason", "trainer_gap", "trained_model_id", "trained_step", "advantage", "kl")
"""The fields of groups and samples that are stored as they are. Arrays are stored as bytes."""
_COLUMNS = tuple(
    getattr(KeptSampleRow, name) for name in (*_GROUP_NAMES, *_SAMPLE_NAMES, "prompt", "tokens", "logprobs")
)
_INSERT = insert(KeptSampleRow)
_DELETE = delete(KeptSampleRow).where(is_in_batch(col(KeptSampleRow.sequence_id)))
_DELETE_GROUPS = delete(KeptSampleRow).where(is_in_batch(col(KeptSampleRow.request_id)))


def add(tx: Session, group: KeptGroup, now: float) -> None:
    """Insert the samples of a group. Samples with the same sequence ids are replaced."""
    # Encode the arrays. The prompt is stored with the first sample only.
    common = {name: getattr(group, name) for name in _GROUP_NAMES}
    rows: list[dict[str, object]] = []
    for index, sample in enumerate(group.samples):
        arrays = {
            "prompt": b"" if index else np.ascontiguousarray(group.prompt, _TOKENS).tobytes(),
            "tokens": np.ascontiguousarray(sample.tokens, _TOKENS).tobytes(),
            "logprobs": np.ascontiguousarray(sample.logprobs, _LOGPROBS).tobytes(),
        }
        values = {name: getattr(sample, name) for name in _SAMPLE_NAMES}
        size = sum(map(len, arrays.values()))
        rows.append({**common, **values, **arrays, "sample_index": index, "at": now, "num_bytes": size})

    # Clients may use sequence ids again
    execute_in_batches(tx, _DELETE, [sample.sequence_id for sample in group.samples])
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
    """Return the kept groups that an owner sampled from one step of a model since a time."""
    query = select(col(KeptSampleRow.request_id)).distinct().where(_HAS_STEP, col(KeptSampleRow.owner) == owner)
    return list(execute(tx, query, {"model_id": model_id, "step": step, "since": since}).scalars())


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
    """Return which of these sequences of an owner are kept."""
    return {sequence_id for (sequence_id,) in execute_in_batches(tx, _KEPT, sequence_ids, owner=owner)}


def record_training(tx: Session, model_id: ModelId, step: int, trained: Iterable[TrainedSequence]) -> None:
    """Record the results of a training pass for kept sequences.

    The new results replace the results of earlier passes.
    """
    common = {"by_model": model_id, "in_step": step}
    rows = [
        {**common, "name": result.sequence_id, "of_advantage": result.advantage, "of_kl": result.kl}
        for result in trained
    ]
    if rows:
        execute(tx, _TRAINED, rows)


def list_steps(tx: Session, model_id: str, owner: str | None, limit: int = 1000) -> list[tuple[int | None, int]]:
    """Return the steps of a model with kept samples and their numbers of groups, newest first.

    `owner` None means all owners. The step is None for samples from base weights, and if the step
    is unknown.
    """
    step = col(KeptSampleRow.step)
    count = func.count(col(KeptSampleRow.request_id).distinct())
    query = select(step, count).where(col(KeptSampleRow.model_id) == model_id).group_by(step)
    if owner is not None:
        query = query.where(col(KeptSampleRow.owner) == owner)
    rows = execute(tx, query.order_by(step.desc().nulls_last()).limit(limit))
    return [(number, num_groups) for number, num_groups in rows]


def has_repeated_prompts(tx: Session, model_id: ModelId, step: int, owner: str) -> bool:
    """Whether an owner's kept groups of a step have one sample each, and some have the same prompt."""
    query = select(col(KeptSampleRow.sample_index), col(KeptSampleRow.prompt)).where(
        _HAS_STEP, col(KeptSampleRow.owner) == owner
    )
    rows = execute(tx, query, {"model_id": model_id, "step": step, "since": 0.0}).all()
    return len({prompt for _, prompt in rows}) < len(rows) and all(index == 0 for index, _ in rows)


def read_step(tx: Session, model_id: str, step: int | None, limit: int, *, owner: str | None) -> list[KeptGroup]:
    """Return at most `limit` groups of one step of a model, ordered by request id.

    `owner` limits the result to one owner's groups, and None means all owners. A step of None means
    base weights or an unknown step.
    """
    request_id = col(KeptSampleRow.request_id)
    chosen = select(request_id).distinct().where(_HAS_STEP).order_by(request_id).limit(limit)
    if owner is not None:
        chosen = chosen.where(col(KeptSampleRow.owner) == owner)
    query = select(*_COLUMNS).where(request_id.in_(chosen)).order_by(request_id, col(KeptSampleRow.sample_index))
    rows = execute(tx, query, {"model_id": model_id, "step": step, "since": 0.0})
    return [_decode_group([*group]) for _, group in groupby(rows, key=lambda row: row.request_id)]


def _decode_group(rows: Sequence[Any]) -> KeptGroup:
    return KeptGroup(
        **{name: getattr(rows[0], name) for name in _GROUP_NAMES},
        prompt=np.frombuffer(rows[0].prompt, _TOKENS),
        samples=[
            KeptSample(
                **{name: getattr(row, name) for name in _SAMPLE_NAMES},
                tokens=np.frombuffer(row.tokens, _TOKENS),
                logprobs=np.frombuffer(row.logprobs, _LOGPROBS),
            )
            for row in rows
        ],
    )


def expire(tx: Session, before: float, *, limit: int = MAX_ROWS) -> int:
    """Delete up to `limit` samples that were drawn before a time, and return how many were deleted.

    If the limit falls inside a group, the next call deletes the rest of the group.
    """
    old = select(col(KeptSampleRow.sequence_id)).where(col(KeptSampleRow.at) < before)
    old = old.order_by(col(KeptSampleRow.at), col(KeptSampleRow.request_id)).limit(limit)
    return execute(tx, delete(KeptSampleRow).where(col(KeptSampleRow.sequence_id).in_(old))).rowcount


def find_superfluous(tx: Session, model_id: str, owner: str, max_bytes: int) -> list[RequestId]:
    """Return the oldest groups of a model and owner that exceed `max_bytes` in total."""
    at = func.max(col(KeptSampleRow.at))
    sizes = (
        select(col(KeptSampleRow.request_id), func.sum(col(KeptSampleRow.num_bytes)))
        .where(col(KeptSampleRow.model_id) == model_id, col(KeptSampleRow.owner) == owner)
        .group_by(col(KeptSampleRow.request_id))
        .order_by(at.desc(), col(KeptSampleRow.request_id))
    )
    total = 0
    superfluous: list[RequestId] = []
    for request_id, num_bytes in execute(tx, sizes):
        total += int(num_bytes)
        if total > max_bytes:
            superfluous.append(request_id)
    return superfluous


def remove_runs(tx: Session, model_ids: Sequence[ModelId]) -> None:
    """Delete all samples from the weights of these models."""
    execute_in_batches(tx, delete(KeptSampleRow).where(is_in_batch(col(KeptSampleRow.model_id))), model_ids)


@dataclass(slots=True)
class KeptGroups:
    """Decides which groups are kept. Caches the chosen groups of recent steps."""

    store: Store
    max_groups: int
    """How many groups to keep per step and owner."""
    _chosen: OrderedDict[tuple[str, Origin, int], list[RequestId]] = field(
        default_factory=OrderedDict[tuple[str, Origin, int], list[RequestId]]
    )

    def choose(self, owner: str, origin: Origin, request_id: RequestId, now: float) -> list[RequestId] | None:
        """Decide whether to keep a group that is about to be written.

        Returns the groups that it replaces, or None if it is not kept.
        """
        if not self.max_groups:
            return None

        chosen = self._read_chosen(owner, origin, now)
        if request_id in chosen:
            return []

        # The group with the largest request id has to go
        replaced: list[RequestId] = []
        if len(chosen) >= self.max_groups:
            if request_id > chosen[-1]:
                return None
            replaced.append(chosen.pop())
        insort(chosen, request_id)
        return replaced

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
