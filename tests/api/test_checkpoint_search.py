"""Searches of checkpoints by plain HTTP, in the form of the SDK's reference pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, model_id
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import audit, keys, projects, sessions
from skyrl_tx.store.tables import CheckpointRow, ModelRow
from tests.support.live_api import Server, live_api

SPEC = codec.encode(ModelSpec(lora=LoraSpec(rank=2, seed=1)))
KINDS = (CheckpointKind.TRAINING, CheckpointKind.SAMPLER, CheckpointKind.EXTERNAL)


def add_run(tx: Session, owner: str, project_id: str | None, base_model: str, first: float) -> None:
    """Add a run with a checkpoint of each kind, one per second, and an expired one."""
    session_id = sessions.create(tx, owner=owner, project_id=project_id, now=1.0)
    tx.flush()
    run = ModelRow(
        model_id=model_id(session_id, 0),
        session_id=session_id,
        base_model=base_model,
        spec=SPEC,
        created_at=1.0,
        last_request_at=1.0,
    )
    tx.add(run)
    tx.flush()

    # Its checkpoints.
    for number, kind in enumerate((*KINDS, CheckpointKind.SAMPLER)):
        row = CheckpointRow(
            model_id=run.model_id,
            kind=kind,
            name=f"{owner}-{base_model}-{number}",
            artifact_id=ArtifactId(f"art-{number:032x}"),
            created_at=first + number / 3,
            expires_at=2.0 if number == len(KINDS) else None,
            size_bytes=1,
            user_metadata={"number": str(number)},
        )
        tx.add(row)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ann has checkpoints of two base models, and shares project p with Bob."""
    data_dir: Path = tmp_path_factory.mktemp("data")
    with live_api(ApiSettings(port=0, data_dir=data_dir, base_model="a")) as server:

        def fill(tx: Session) -> str:
            add_run(tx, "ann", "p", "a", 10.0)
            add_run(tx, "ann", None, "b", 20.0)
            add_run(tx, "bob", "p", "a", 10.0)
            add_run(tx, "eve", "q", "a", 40.0)
            projects.put_member(tx, "p", "ann", "viewer", audit.OPERATOR, 1.0)
            return keys.create(tx, owner="ann", scope="read", name="", note="", now=1.0)[0]

        server.client.headers["X-API-Key"] = server.store.write(fill)
        yield server


def search(server: Server, path: str = "checkpoints/search", **conditions: object) -> list[str]:
    """Return the names of all results, in pages of two."""
    names: list[str] = []
    cursor: dict[str, Any] | None = None
    while True:
        page = server.post(path, **conditions, limit=2, cursor=cursor).json()
        names += [found["tinker_path"].rpartition("/")[2] for found in page["checkpoints"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            return names


ANN = ["ann-b-2", "ann-b-1", "ann-b-0", "ann-a-2", "ann-a-1", "ann-a-0"]
"""Newest first."""


def test_pages_have_the_callers_checkpoints_newest_first(server: Server) -> None:
    assert search(server) == search(server, "search_checkpoints") == ANN
    found = server.post("checkpoints/search", limit=1).json()["checkpoints"][0]
    assert (found["base_model"], found["checkpoint_type"], found["user_metadata"]) == ("b", "external", {"number": "2"})
    listed = server.client.get("/api/v1/checkpoints").json()["checkpoints"]
    assert found in [{name: value for name, value in row.items() if value is not None} for row in listed]


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        ({"checkpoint_type": "training"}, ["ann-b-0", "ann-a-0"]),
        ({"user_metadata": {"number": "1"}}, ["ann-b-1", "ann-a-1"]),
        ({"user_metadata": {"number": "1", "x": "y"}}, []),
        ({"base_models": ["a", "c"]}, ANN[3:]),
        ({"base_models": []}, []),
        ({"project_ids": ["p"]}, ANN[3:]),
        ({"project_ids": ["q"]}, []),
        ({"owner": {"type": "user", "owner_urns": ["tml:user:bob"]}}, ["bob-a-2", "bob-a-1", "bob-a-0"]),
        ({"owner": {"type": "user", "owner_urns": ["tml:user:eve"]}}, []),
    ],
)
def test_all_conditions_hold(server: Server, conditions: dict[str, Any], names: list[str]) -> None:
    assert search(server, **conditions) == names


def test_checkpoints_of_the_same_time_appear_once(server: Server) -> None:
    """Ann's and Bob's runs in the project have the same times."""
    found = search(server, owner={"type": "accessible"}, project_ids=["p"])
    assert sorted(found) == sorted([*ANN[3:], "bob-a-2", "bob-a-1", "bob-a-0"])
    assert [name[-1] for name in found] == ["2", "2", "1", "1", "0", "0"]


def test_a_cursor_of_another_form_is_refused(server: Server) -> None:
    cursor = {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "x"}
    answer = server.post("checkpoints/search", cursor=cursor)
    assert answer.status_code == 400 and "'x' is not of the form" in answer.json()["detail"]
