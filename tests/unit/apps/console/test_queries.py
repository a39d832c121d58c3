"""Console queries return the same results on SQLite and PostgreSQL."""

from collections.abc import Callable

import pytest
from sqlmodel import Session

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.queries import ListQuery, OpenGroup
from skyrl_tx.apps.history import logged_metrics
from skyrl_tx.apps.history.logged_metrics import LoggedRun, NewLoggedPoint
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, ModelId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.store import futures, keys, sessions
from skyrl_tx.store.database import Store, get_existing
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import CheckpointRow, ModelRow, RequestRow, SamplingSessionRow

NOW = 1000.0
ANN, BOB = SessionId("session-a"), SessionId("session-b")
FIRST, SECOND, OTHER = ModelId("session-a:train:0"), ModelId("session-a:train:1"), ModelId("session-b:train:0")
START = f"tinker://{FIRST}/weights/start"


def model(model_id: ModelId, last_request_at: float, **more: object) -> ModelRow:
    values = {"base_model": "Qwen", "spec": codec.encode(ModelSpec(lora=LoraSpec(rank=8, seed=1))), "status": "ready"}
    session = SessionId(model_id.partition(":")[0])
    times = {"created_at": last_request_at, "last_request_at": last_request_at}
    return ModelRow(model_id=model_id, session_id=session, **{**values, **times, **more})


def checkpoint(model_id: ModelId, name: str, created_at: float, **more: object) -> CheckpointRow:
    kind = CheckpointKind.TRAINING
    values = {"artifact_id": ArtifactId("art-1"), "created_at": created_at, "size_bytes": 10, **more}
    return CheckpointRow(model_id=model_id, kind=kind, name=name, **values)


def submit(tx: Session, session_id: SessionId, number: int, owner: str, status: str = "open") -> None:
    model_id = ModelId(f"{session_id}:train:0")
    new = NewRequest(
        key=f"{session_id} {number}",
        kind="model_pass",
        owner=owner,
        session_id=session_id,
        model_id=model_id,
        seq_id=number,
        body=b"x",
    )
    position = futures.submit(tx, new, NOW + number).position
    row = get_existing(tx, RequestRow, position)
    row.status, row.result = status, b"broken" if status == "failed" else None


@pytest.fixture
def filled(store: Store) -> Store:
    def fill(tx: Session) -> None:
        for name, owner, project in ((ANN, "ann", "100%_maths"), (BOB, "bob", None)):
            sessions.create(tx, owner=owner, tags=["t"], user_metadata={}, now=NOW, session_id=name, project_id=project)
        tx.flush()
        tx.add_all([model(FIRST, 3.0), model(SECOND, 5.0, loaded_from=START), model(OTHER, 4.0, loaded_from=START)])
        tx.flush()
        tx.add(checkpoint(FIRST, "start", 1.0))
        tx.add(checkpoint(SECOND, "copy", 3.0, copied_from=START, public=True))
        tx.add(checkpoint(SECOND, "old", 2.0, expires_at=NOW - 1))
        tx.add(checkpoint(OTHER, "gone", 2.0, deleted_at=5.0, artifact_id=ArtifactId("art-2")))
        for number in (1, 2):
            submit(tx, ANN, number, "ann")
        submit(tx, BOB, 1, "bob", "failed")
        submit(tx, ANN, 3, "ann", "failed")
        usage.add(tx, "ann", ANN, FIRST, 700.0, [Work(kind="training", tokens=5), Work(kind="sampled", tokens=1)])
        usage.add(tx, "ann", ANN, SECOND, 800.0, [Work(kind="training", tokens=7)])
        usage.add(tx, "bob", BOB, OTHER, 1000.0, [Work(kind="training", tokens=2**40)])
        row = logged_metrics.open_run(
            tx, LoggedRun(owner="ann", project="p", key="k", name="maths", model_id=FIRST), NOW
        )
        logged_metrics.add_points(
            tx, row, [NewLoggedPoint(log_id=str(n), step=n, values={"reward": n / 2}) for n in (2, 1)], NOW
        )

        for number in range(2):
            tx.add(
                SamplingSessionRow(
                    sampling_session_id=SamplingSessionId(f"{ANN}:sample:{number}"),
                    session_id=ANN,
                    base_model="Qwen",
                    created_at=float(number),
                    last_used_at=2.0,
                )
            )

        for owner in ("ann", "bob", "ann"):
            keys.create(tx, owner=owner, scope="user", name=owner, note="", now=NOW)
        first = keys.list_all(tx)[0]
        first.revoked_at = NOW

    store.write(fill)
    return store


def names(store: Store, owner: str | None, search: str = "", project: str | None = None, **page: int) -> list[str]:
    query = ListQuery(owner=owner, project=project, search=search, **{"limit": 10, **page})
    found, total = store.read(lambda tx: queries.list_runs(tx, query))
    assert total >= len(found)
    return [line.row.model_id for line in found]


def test_runs_are_listed_last_used_first_and_by_owner(filled: Store) -> None:
    assert names(filled, None) == [SECOND, OTHER, FIRST]
    assert names(filled, "ann") == [SECOND, FIRST] and names(filled, "dan") == []
    assert names(filled, None, limit=1, offset=1) == [OTHER]
    assert names(filled, None, project="100%_maths") == [SECOND, FIRST]


@pytest.mark.parametrize(
    ("search", "number"), [("0%_m", 2), ("%", 2), ("_", 2), ("session-b", 1), ("bob", 1), ("'", 0)]
)
def test_a_search_takes_its_text_literally(filled: Store, search: str, number: int) -> None:
    assert len(names(filled, None, search)) == number
    found, total = filled.read(lambda tx: queries.read_session_page(tx, ListQuery(owner=None, search=search, limit=10)))
    assert len(found) == total == min(number, 1)


def test_one_run_the_runs_of_a_session_and_those_that_were_loaded(filled: Store) -> None:
    of_session = filled.read(lambda tx: queries.list_runs_of_session(tx, ANN, 10))
    assert [(line.row.model_id, line.session.owner) for line in of_session] == [(FIRST, "ann"), (SECOND, "ann")]
    loaded = filled.read(lambda tx: queries.list_runs_loaded_from(tx, START, 10))
    assert loaded == [OTHER, SECOND]
    copies = filled.read(lambda tx: queries.list_copies(tx, START, 10, NOW))
    assert [row.name for row in copies] == ["copy"]


@pytest.mark.parametrize(
    ("scope", "owner", "expected"),
    [
        ("own", "ann", (["copy", "start"], 2, 20)),
        ("own", None, (["copy", "start"], 2, 20)),
        ("published", "bob", (["copy"], 1, 10)),
        ("deleted", "bob", (["gone"], 1, 10)),
        ("deleted", "ann", ([], 0, 0)),
    ],
)
def test_checkpoints_by_scope(
    filled: Store, scope: str, owner: str | None, expected: tuple[list[str], int, int]
) -> None:
    rows, number, size = filled.read(
        lambda tx: queries.read_checkpoint_page(tx, ListQuery(owner=owner, limit=10), kind="", scope=scope, now=NOW)
    )
    assert ([row.name for row, _ in rows], number, size) == expected


def test_checkpoints_of_runs_and_references_to_their_files(filled: Store) -> None:
    rows = filled.read(lambda tx: queries.list_checkpoints_of_runs(tx, [FIRST, SECOND], 10, NOW))
    assert [row.name for row in rows] == ["start", "copy"]
    assert filled.read(lambda tx: queries.count_references(tx, ["art-1", "art-2"], NOW)) == {"art-1": 2}


def test_open_and_failed_requests(filled: Store) -> None:
    groups = filled.read(lambda tx: queries.list_open_groups(tx, None))
    (group,) = groups
    assert group == OpenGroup("ann", ANN, "model_pass", FIRST, None, 2, group.first_position)
    assert filled.read(lambda tx: queries.get_arrival_time(tx, group.first_position)) == NOW + 1
    assert filled.read(lambda tx: queries.list_open_groups(tx, "bob")) == []
    failed = filled.read(lambda tx: queries.list_failed_requests(tx, None, 10))
    assert [(line.times.owner, line.result) for line in failed] == [("ann", b"broken"), ("bob", b"broken")]
    assert [line.times.owner for line in filled.read(lambda tx: queries.list_failed_requests(tx, "bob", 10))] == ["bob"]
    of_model = filled.read(lambda tx: queries.list_requests_of_model(tx, FIRST, 2))
    assert [(line.times.seq_id, line.times.status) for line in of_model] == [(3, "failed"), (2, "open")]


def test_usage_by_bucket_and_of_a_session(filled: Store) -> None:
    everything = filled.read(lambda tx: usage.read_buckets(tx, 0))
    assert sorted(everything) == [(600, "sampled", 1), (600, "training", 12), (900, "training", 2**40)]
    of_session = filled.read(lambda tx: usage.read_buckets(tx, 0, ANN))
    assert sorted(of_session) == [(600, "sampled", 1), (600, "training", 12)]
    assert filled.read(lambda tx: usage.read_buckets(tx, 1200, BOB)) == []


def test_logged_metrics_samplers_and_keys(filled: Store) -> None:
    found = filled.read(lambda tx: logged_metrics.read_last_steps(tx, FIRST, 10))
    assert [(point.step, point.values) for point in found] == [(1, {"reward": 0.5}), (2, {"reward": 1.0})]
    assert filled.read(lambda tx: logged_metrics.get_logger_names(tx, [FIRST, SECOND])) == {FIRST: "maths"}
    samplers = filled.read(lambda tx: queries.list_samplers_of_session(tx, ANN, 1))
    assert [row.sampling_session_id for row in samplers] == [f"{ANN}:sample:1"]

    def page(owner: str | None) -> Callable[[Session], tuple[list[str], int]]:
        def read(tx: Session) -> tuple[list[str], int]:
            rows, total = queries.read_key_page(tx, ListQuery(owner=owner, limit=10))
            return [row.owner for row in rows], total

        return read

    assert filled.read(page(None)) == (["ann", "bob", "ann"], 3), "the revoked key is last"
    assert filled.read(page("bob")) == (["bob"], 1)
