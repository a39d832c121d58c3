"""The status of sessions, what new clients are told, and whether the model can be sampled."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version
from sqlmodel import Session, select
from tinker.types import SessionSearchResponse

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import SessionId, model_id
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.server.routes.sessions import NEWEST_TESTED_SDK
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import engine_state, models, sessions
from skyrl_tx.store.tables import EngineStateRow, ModelRow, ModelStatus
from tests.support.client_environments import SDKS
from tests.support.live_api import Server, live_api

SPEC = codec.encode(ModelSpec(lora=LoraSpec(rank=2, seed=1)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live_api(ApiSettings(port=0, data_dir=tmp_path_factory.mktemp("data"), base_model="a")) as server:
        yield server


def add_session(
    server: Server, name: str, runs: tuple[ModelStatus, ...] = (), reason: str | None = None, heartbeat: float = 0.0
) -> SessionId:
    def work(tx: Session) -> SessionId:
        now = heartbeat or time.time()
        session_id = sessions.create(tx, owner="local", display_name=name, now=now)
        tx.flush()

        # Its runs.
        for number, status in enumerate(runs):
            run = ModelRow(
                model_id=model_id(session_id, number),
                session_id=session_id,
                base_model="a",
                spec=SPEC,
                status=status,
                created_at=now,
                last_request_at=now,
            )
            tx.add(run)
        if reason is not None:
            sessions.finish(tx, session_id, reason, now)
        return session_id

    return server.store.write(work)


def test_searches_match_failed_and_cancelled_sessions(server: Server) -> None:
    """A session failed if no run of it could be created, and the client has not said how it ended."""
    failed = add_session(server, "failed", ("failed", "failed"))
    add_session(server, "recovered", ("failed", "ready"))
    add_session(server, "ended", (), "no heartbeat for 1800 s")
    add_session(server, "errored", ("failed",), "errored: ValueError")
    add_session(server, "silent", heartbeat=1.0)

    def search(*statuses: str) -> dict[str | None, object]:
        conditions = {"statuses": [{"type": status} for status in statuses]} if statuses else {}
        page = server.post("sessions/search", **conditions).json()
        assert SessionSearchResponse.model_validate(page)
        return {found["display_name"]: found.get("status") for found in page["sessions"]}

    statuses = search()
    assert statuses["failed"] == {
        "type": "failed",
        "category": "user",
        "reason": {"type": "training_run", "training_run_id": model_id(failed, 1)},
        "message": "the training run could not be created",
    }
    assert statuses["ended"] == {"type": "cancelled", "detail": "no heartbeat for 1800 s"}
    assert statuses["silent"] is None
    assert search("failed").keys() == {"failed"} and search("cancelled").keys() == {"ended"}
    assert search("active", "client_finished").keys() == {"recovered", "errored"}


def test_clients_of_untested_releases_are_warned(server: Server) -> None:
    assert max(Version(version) for version in SDKS).release[:2] == NEWEST_TESTED_SDK
    for version, is_warned in (
        ("0.38.0", False),
        ("0.39.1", True),
        ("1.0", True),
        ("unknown", False),
        ("9" * 50, False),
    ):
        headers = {"x-stainless-package-version": version}
        created = server.client.post("/api/v1/create_session", json={"tags": []}, headers=headers).json()
        assert (f"the client has {version}" in created.get("warning_message", "")) == is_warned


@pytest.mark.parametrize(
    ("backend", "can_sample"),
    [
        ({}, True),
        ({"sampler_servers": 2, "sampler_servers_lost": 1}, True),
        ({"sampler_servers": 2, "sampler_servers_lost": 2}, False),
        ({"sampler_servers": 2, "sampler_servers_lost": 2, "fallback_samples": 0}, True),
    ],
)
def test_a_model_without_sampling_servers_cannot_be_sampled(
    server: Server, backend: dict[str, int], can_sample: bool
) -> None:
    def write(tx: Session) -> None:
        row = EngineStateRow(
            number=1,
            boot_id="b",
            pid=1,
            status="ready",
            capabilities={"max_context_length": 8},
            base_models=["a"],
            # What clients are told
            meters={"backend": backend},
            updated_at=time.time(),
        )
        tx.merge(row)

    server.store.write(write)
    (model,) = server.client.get("/api/v1/get_server_capabilities").json()["supported_models"]
    assert model == {"model_name": "a", "max_context_length": 8, "trainable": True, "sampleable": can_sample}
    assert engine_state.can_sample([])


@pytest.mark.parametrize(("value", "status"), [("3", 200), (3, 200), ("all", 200), ("0", 400), ("-1", 400), ("x", 400)])
def test_a_session_says_how_many_checkpoints_its_runs_keep(server: Server, value: object, status: int) -> None:
    answer = server.post("create_session", tags=[], user_metadata={"skyrl_tx.keep_last": value})
    assert answer.status_code == status, answer.text
    assert status == 200 or "skyrl_tx.keep_last must be a number from 1, or 'all'" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("of_session", "of_run", "shares"),
    [({}, None, True), ({"skyrl_tx.share_prefixes": False}, None, False)]
    + [
        ({"skyrl_tx.share_prefixes": value}, {"skyrl_tx.share_prefixes": own}, own == "true")
        for value, own in (("true", "false"), ("false", "true"))
    ],
)
def test_a_session_or_a_run_says_whether_its_passes_share_prefixes(
    server: Server, of_session: dict[str, object], of_run: dict[str, object] | None, shares: bool
) -> None:
    session_id = server.post("create_session", tags=[], user_metadata=of_session).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "a", "lora_config": {"rank": 2}}
    answers = [server.post("create_model", **body, user_metadata=of_run).json() for _ in range(2)]
    assert answers[0]["request_id"] == answers[1]["request_id"]
    model = server.store.read(lambda tx: models.get(tx, model_id(session_id, 0)))
    assert model is not None
    spec = codec.decode(model.spec)
    assert isinstance(spec, ModelSpec) and spec.shares_prefixes is shares


@pytest.mark.parametrize("metadata", [{}, {"skyrl_tx.share_prefixes": "true"}])
def test_a_setting_turns_shared_prefixes_of_new_runs_off(tmp_path: Path, metadata: dict[str, str]) -> None:
    for is_off in (False, True):  # the second server finds the run of the first one
        settings = ApiSettings(port=0, data_dir=tmp_path, base_model="a", no_shared_prefixes=is_off)
        with live_api(settings) as server:
            session_id = server.post("create_session", tags=[], user_metadata=metadata).json()["session_id"]
            body = {"session_id": session_id, "model_seq_id": 0, "base_model": "a", "lora_config": {"rank": 2}}
            assert server.post("create_model", **body).status_code == 200
            specs = [codec.decode(row.spec) for row in server.store.read(lambda tx: tx.exec(select(ModelRow)).all())]
    assert sorted(spec.shares_prefixes for spec in specs if isinstance(spec, ModelSpec)) == [False, True]


def test_a_wrong_value_of_share_prefixes_is_refused(server: Server) -> None:
    answer = server.post("create_session", tags=[], user_metadata={"skyrl_tx.share_prefixes": "no"})
    assert answer.status_code == 400
    assert "skyrl_tx.share_prefixes must be 'true' or 'false'" in answer.json()["detail"]


def test_a_specification_of_an_earlier_release_shares_nothing_and_keeps_its_bytes() -> None:
    spec = ModelSpec(lora=LoraSpec(rank=2, seed=1))
    assert b"shares_prefixes" not in codec.encode(spec)
    restored = codec.decode(codec.encode(spec))
    assert isinstance(restored, ModelSpec) and restored.shares_prefixes is not True
