"""The identity of a database and its artifacts. It protects artifacts from garbage collection.

Garbage collection may remove unreferenced artifacts only if the database knows all artifacts. To
check this, the database and the artifact store both record a random id and a counter, the epoch,
which grows with each claim. A database with another id or a smaller epoch is a new database, a
different one or an older copy. Unreferenced artifacts are then unclaimed: they are kept until a row
refers to them again or the operator removes them.
"""

import secrets
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore, Identity
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.store import checkpoints
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import IdentityRow

_REMOTE = "remote-"
"""Prefix of the database id if the artifacts are in an object store."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Permission to collect unreferenced artifacts, except `unclaimed`."""

    unclaimed: frozenset[ArtifactId]
    claimed_at: float
    """The Unix time of the claim, in seconds, by the clock of the artifact store.

    Garbage collection subtracts the time of an artifact from this time to get the artifact's age.
    """


def get(tx: Session) -> IdentityRow | None:
    """Return the identity, or None if no engine of this release has started yet."""
    return tx.get(IdentityRow, 1)


def is_current(row: IdentityRow | None, recorded: Identity | None) -> bool:
    """Return whether the artifacts belong to this database and it is not an older copy.

    A larger epoch in the database also counts as current: `claim` writes the epoch of the database
    first, and a crash before its second write leaves the artifacts with a smaller epoch.
    """
    if row is None or recorded is None:
        return False
    return row.store_id == recorded.store_id and row.epoch >= recorded.epoch


def check_artifacts(store: Store, artifacts: ArtifactStore) -> None:
    """Raise UserError if the database refers to artifacts and the artifact store has none of them.

    Without this check, an engine that starts with the wrong artifact store would treat every model
    as lost. The check is skipped if the artifacts are in the data directory now and were there
    at the last claim.
    """
    row, recorded = store.read(get), artifacts.read_identity()
    if row is None or (recorded is not None and recorded.store_id == row.store_id):
        return
    if not artifacts.is_remote and not row.store_id.startswith(_REMOTE):
        return  # the directory was lost: the engine replays the log of each model
    referenced = store.read(checkpoints.find_referenced_artifacts) or set()
    if referenced and referenced.isdisjoint(artifacts.list_ids()):
        raise UserError(
            f"the database refers to {len(referenced)} artifacts, but {artifacts.location} has none of them: "
            "set --artifacts to the location where they were stored"
        )


def find_unclaimed(store: Store, artifacts: ArtifactStore) -> frozenset[ArtifactId]:
    """Return the unclaimed artifacts. Changes nothing."""
    recorded = artifacts.read_identity()

    # The artifacts are listed before the references are read. An artifact that is created in
    # between is not listed.
    present = set(artifacts.list_ids())
    candidates = set(recorded.unclaimed) & present if recorded is not None else set[ArtifactId]()
    if not is_current(store.read(get), recorded):
        candidates = present
    if not candidates:
        return frozenset()
    return frozenset(candidates - (store.read(checkpoints.find_referenced_artifacts) or set()))


def claim(store: Store, artifacts: ArtifactStore) -> Claim:
    """Compare the identities, record unclaimed artifacts and advance both epochs.

    Only engines call this. The epochs do not change if the identities agree and no artifact was
    added or removed since the last claim, see `touch_identity`. Raises OSError if the identity of
    the artifacts cannot be written.
    """
    recorded = artifacts.read_identity() or Identity(store_id="", epoch=0)
    if is_current(store.read(get), recorded) and (claimed_at := artifacts.touch_identity()) is not None:
        return Claim(unclaimed=frozenset(recorded.unclaimed), claimed_at=claimed_at)

    # Record new unclaimed artifacts before the epochs agree again, because this process may crash
    # in between.
    unclaimed = find_unclaimed(store, artifacts)
    if not unclaimed <= frozenset(recorded.unclaimed):
        artifacts.write_identity(
            Identity(store_id=recorded.store_id, epoch=recorded.epoch, unclaimed=tuple(sorted(unclaimed)))
        )

    def advance(tx: Session) -> tuple[str, int]:
        row = get(tx)
        if row is None:
            row = IdentityRow(store_id="")
            tx.add(row)
        if not row.store_id or row.store_id.startswith(_REMOTE) != artifacts.is_remote:
            row.store_id = (_REMOTE if artifacts.is_remote else "") + secrets.token_hex(16)
        row.epoch = max(row.epoch, recorded.epoch) + 1
        return row.store_id, row.epoch

    store_id, epoch = store.write(advance)
    identity = Identity(store_id=store_id, epoch=epoch, unclaimed=tuple(sorted(unclaimed)))
    return Claim(unclaimed=unclaimed, claimed_at=artifacts.write_identity(identity))


def describe_unclaimed(unclaimed: frozenset[ArtifactId]) -> str:
    """Return a message about unclaimed artifacts that tells the operator what to do."""
    return (
        f"this database has no rows for {len(unclaimed)} artifacts: it is a new database, a different one, or an older "
        "copy. The artifacts are kept. `skyrl-tx recover` restores their checkpoints, `skyrl-tx doctor` lists them, "
        "`skyrl-tx doctor --remove-unclaimed` moves them to the trash"
    )
