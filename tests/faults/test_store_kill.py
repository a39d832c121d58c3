"""Acknowledged writes survive a kill of the writer, and no write is partial."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from skyrl_tx.apps.history import points
from skyrl_tx.apps.teams import usage
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import Store

NUM_KILLS = 6
WRITER = """
import itertools, os, sys
from pathlib import Path
from skyrl_tx.apps.history import points
from skyrl_tx.apps.teams import usage
from skyrl_tx.store import futures, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import ModelRow

store = Store.open(Path(sys.argv[1]), role="engine", url=sys.argv[3] or None)
life = sys.argv[2]

def begin(tx):
    session_id = sessions.create(tx, owner="ann", tags=[], user_metadata=None, sdk_version=None, project_id=None,
                                 display_name=None, now=1.0)
    models.create(tx, ModelRow(model_id=life, session_id=session_id, base_model="b", spec=b"", created_at=1.0,
                               last_request_at=1.0))
    return session_id

session_id = store.write(begin)

def effect(tx, number):
    '''One work, five rows: a request, its answer, the count of its model's effects, a point and its usage.'''
    new = NewRequest(key=f"{life}/{number}", kind="model_pass", owner="ann", session_id=session_id,
                     body=os.urandom(5000), model_id=life)
    submitted = futures.submit(tx, new, 1.0)
    points.add(tx, points.Point(position=submitted.position, model_id=life, kind="train", step=number, created_at=1.0,
                                started_at=1.0, at=2.0, device_s=0.5, tokens=3, datums=1, values={"loss:sum": 0.5}))
    usage.add(tx, "ann", session_id, life, 2.0, [usage.Work(kind="training", tokens=3)])
    effect_order = models.assign_effect_order(tx, life)
    futures.complete(tx, submitted.request_id, b"result", failed=False, effect_order=effect_order, now=2.0)
    return number

def acknowledge(future):
    os.write(1, f"{future.result()}\\n".encode())

for number in itertools.count(1):
    write = store.write_soon(lambda tx, number=number: effect(tx, number))
    write.add_done_callback(acknowledge)
    if number % 7 == 0:  # groups of up to seven
        write.result()
"""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")


def test_acknowledged_writes_survive_a_kill_and_no_write_is_partial(tmp_path: Path, database_url: str | None) -> None:
    Store.open(tmp_path, role="engine", url=database_url).close()
    lives = random.Random(7)

    for life in range(NUM_KILLS):
        wanted = lives.randrange(1, 60)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path, f"life-{life}", database_url or ""],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(wanted)]
            writer.kill()
            lines += writer.stdout.readlines()  # acknowledged before it died; the last line may be cut

        acknowledged = {int(line) for line in lines if line.endswith("\n")}
        assert len(acknowledged) >= wanted
        check(tmp_path, database_url, f"life-{life}", acknowledged)


def check(data_dir: Path, database_url: str | None, life: str, acknowledged: set[int]) -> None:
    store = Store.open(data_dir, role="engine", url=database_url)
    requests = text("SELECT effect_order, status, length(body), result FROM requests WHERE model_id = :life")
    count = text("SELECT effect_order FROM models WHERE model_id = :life")
    rows = store.read(lambda tx: tx.connection().execute(requests, {"life": life}).all())
    num_effects = store.read(lambda tx: tx.connection().execute(count, {"life": life}).scalar_one())
    curve = store.read(lambda tx: points.read_points(tx, ModelId(life)))
    used = store.read(lambda tx: usage.read_totals(tx, "ann", 0.0, model_id=life))

    if database_url is None:
        health = store.read(lambda tx: tx.connection().execute(text("PRAGMA integrity_check")).scalar_one())
        assert health == "ok"
    store.close()
    assert sorted(rows) == [(number, "done", 5000, b"result") for number in range(1, num_effects + 1)]
    assert [point.step for point in curve] == list(range(1, num_effects + 1))
    assert sum(total.tokens for total in used) == 3 * num_effects
    assert acknowledged <= set(range(1, num_effects + 1))
