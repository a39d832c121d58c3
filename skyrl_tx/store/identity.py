"""The identity of a database and its artifacts: proves that the database knows all artifacts before any is collected.

Both keep the same random id and an epoch, which grows at each start of an engine and before each garbage collection. A
database with another id or a smaller epoch is a new, a different or an older one. What lies there and is unreferenced
is then unclaimed: it stays until a row refers to it again, or until it is removed on request.
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
"""Start of the ids of databases whose artifacts are in an object store."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to collect unreferenced artifacts, except `unclaimed`, by their age at `looked_at`."""

    unclaimed: frozenset[ArtifactId]
    looked_at: float
    """Time of the claim by the clock of the artifacts' file system, in seconds since the epoch."""


def get(tx: Session) -> IdentityRow | None:
    """Return the identity, or None before the first start of an engine of this release."""
    return tx.get(IdentityRow, 1)


def is_current(row: IdentityRow | None, recorded: Identity | None) -> bool:
    """Whether a database is the one that the artifacts belong to, and no older copy of it.

    Its epoch may be larger, after a crash between the two writes of `claim`.
    """
    if row is None or recorded is None:
        return False
    return row.store_id == recorded.store_id and row.epoch >= recorded.epoch


def check_artifacts(store: Store, artifacts: ArtifactStore) -> None:
    """Raise UserError if the database refers to artifacts in an object store, or in a directory, that is another one.

    An engine without the artifacts of its database would take every model for lost.
    """
    row, recorded = store.read(get), artifacts.read_identity()
    if row is None or (recorded is not None and recorded.store_id == row.store_id):
        return
    if not artifacts.is_remote and not row.store_id.startswith(_REMOTE):
        return  # models of a directory that was lost are replayed as far as the log goes
    referenced = store.read(checkpoints.find_referenced_artifacts) or set()
    if referenced and referenced.isdisjoint(artifacts.list_ids()):
        raise UserError(
            f"the database refers to {len(referenced)} artifacts, and {artifacts.location} has none of them: "
            "--artifacts must name the place where they were stored"
        )


def find_unclaimed(store: Store, artifacts: ArtifactStore) -> frozenset[ArtifactId]:
    """Return the unclaimed artifacts, without a change."""
    recorded = artifacts.read_identity()
    present = set(artifacts.list_ids())  # listed before the references are read: later ones have rows or are young
    found = set(recorded.unclaimed) & present if recorded is not None else set[ArtifactId]()
    if not is_current(store.read(get), recorded):
        found = present
    return frozenset(found - (store.read(checkpoints.find_referenced_artifacts) or set()) if found else found)


def claim(store: Store, artifacts: ArtifactStore) -> Claim:
    """Compare the identities, mark unclaimed artifacts, and advance both epochs; for the process with the engine role.

    The epochs stay while there are neither new artifacts nor fewer. Raises OSError if the artifacts' identity cannot be
    written.
    """
    recorded = artifacts.read_identity() or Identity(store_id="", epoch=0)
    if is_current(store.read(get), recorded) and (looked_at := artifacts.touch_identity()) is not None:
        return Claim(unclaimed=frozenset(recorded.unclaimed), looked_at=looked_at)
    unclaimed = find_unclaimed(store, artifacts)
    if not unclaimed <= frozenset(recorded.unclaimed):
        # On disk before the epochs agree again, because a crash may follow.
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
    return Claim(unclaimed=unclaimed, looked_at=artifacts.write_identity(identity))


def describe_unclaimed(unclaimed: frozenset[ArtifactId]) -> str:
    """Return a message about unclaimed artifacts that says what to do."""
    return (
        f"{len(unclaimed)} artifacts belong to rows that this database does not have: it is new, another one, or older "
        "than they are. They are kept. `skyrl-tx recover` restores their checkpoints, `skyrl-tx doctor` lists them, "
        "`skyrl-tx doctor --remove-unclaimed` moves them to the trash"
    )
