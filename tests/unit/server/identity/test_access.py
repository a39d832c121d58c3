from typing import Any

from sqlalchemy import Engine, event

from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, ModelId, SessionId
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.access import ReadableRun
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import checkpoints, models, projects, sessions
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow

NOW = 100.0
SPEC = codec.encode(requests.ModelSpec(lora=requests.LoraSpec(rank=8, seed=1)))
KINDS = (CheckpointKind.TRAINING, CheckpointKind.SAMPLER, CheckpointKind.TRAINING)


def add_runs(store: Store, owner: str, count: int, *, project: str | None = None, public: bool = False) -> None:
    """Add runs with three checkpoints each. With `public`, the first one is published."""

    def write(tx: Any) -> None:
        for number in range(count):
            session_id = sessions.create(tx, owner=owner, now=1.0, project_id=project)
            run = ModelId(f"{session_id}:train:{number}")
            row = ModelRow(
                model_id=run,
                session_id=SessionId(session_id),
                base_model="m",
                spec=SPEC,
                created_at=1.0,
                last_request_at=2.0,
            )
            models.create(tx, row)
            tx.flush()

            for step, kind in enumerate(KINDS):
                saved = CheckpointRow(
                    model_id=run,
                    kind=kind,
                    name=str(step),
                    artifact_id=ArtifactId(f"art-{step}"),
                    created_at=float(step),
                    size_bytes=1,
                    public=public and step == 0,
                )
                checkpoints.put(tx, saved, overwrite=False)

    store.write(write)


def find_runs(store: Store, caller: Principal) -> tuple[list[ReadableRun], list[ReadableRun], int]:
    """Return all runs that a caller may read, found together and one by one, and the number of queries."""
    statements: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    def read(tx: Any) -> tuple[list[ReadableRun], list[ReadableRun], int]:
        rows, _ = models.list_owned(tx, None, 1000, 0)
        engine: Engine = tx.get_bind()
        event.listen(engine, "before_cursor_execute", record)
        together = access.find_readable_runs(tx, caller, rows, NOW)
        event.remove(engine, "before_cursor_execute", record)
        one_by_one = [access.find_readable_run(tx, caller, run.row.model_id, NOW) for run in together]
        return together, one_by_one, len(statements)

    return store.read(read)


def test_many_runs_take_as_many_queries_as_one(store: Store) -> None:
    add_runs(store, "ann", 1)
    num_queries = find_runs(store, Principal("ann"))[2]
    add_runs(store, "ann", 40)
    runs, _, num_queries_of_many = find_runs(store, Principal("ann"))
    assert len(runs) == 41 and num_queries_of_many == num_queries


def test_runs_found_together_are_those_found_one_by_one(store: Store) -> None:
    """A run has the latest checkpoint of each kind, and of another owner's run only the published ones."""
    add_runs(store, "ann", 2)
    add_runs(store, "bob", 1)
    add_runs(store, "bob", 1, public=True)
    add_runs(store, "bob", 1, project="shared")
    store.write(lambda tx: projects.put_member(tx, "shared", "ann", "viewer", Actor("root", None), 1.0))

    for caller, num_runs in ((Principal("ann"), 4), (Principal("cleo"), 1), (Principal("root", "admin"), 5)):
        together, one_by_one, _ = find_runs(store, caller)
        assert len(together) == num_runs
        for run, alone in zip(together, one_by_one, strict=True):
            assert (run.row, run.owner, run.is_fully_visible) == (alone.row, alone.owner, alone.is_fully_visible)
            latest = {row.kind: row for row in alone.checkpoints}
            assert list(run.checkpoints) == sorted(latest.values(), key=lambda row: row.created_at)
