"""Quota use: training and sample tokens per day, models in training, checkpoint bytes."""

from functools import partial

import pytest
from sqlmodel import select

from skyrl_tx.apps.teams import quotas, usage
from skyrl_tx.apps.teams.quotas import Account, Quota, Rules, Subject, make_room_for_checkpoint
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, ModelId, SessionId
from skyrl_tx.store import audit, checkpoints, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow

DAY = 20_000 * 86_400.0
NOON = DAY + 43_200
ANN, KEY, MATH = Subject("owner", "ann"), Subject("key", "4"), Subject("project", "math")


@pytest.fixture
def team(store: Store) -> dict[str, SessionId]:
    """Two sessions of ann, one with a key and a project, and a session of bob in the same project."""

    def make(tx) -> dict[str, SessionId]:
        return {
            "plain": sessions.create(tx, owner="ann", now=DAY),
            "keyed": sessions.create(tx, owner="ann", now=DAY, key_id=4, project_id="math"),
            "bob": sessions.create(tx, owner="bob", now=DAY, project_id="math"),
        }

    return store.write(make)


def add_model(store: Store, session_id: SessionId, name: str, status: str = "ready") -> ModelId:
    model_id = ModelId(f"{session_id}:train:{name}")
    row = ModelRow(
        model_id=model_id,
        session_id=session_id,
        base_model="tiny",
        spec=b"",
        status=status,  # type: ignore[arg-type]
        created_at=DAY,
        last_request_at=DAY,
    )
    store.write(lambda tx: models.create(tx, row))
    return model_id


def add_checkpoint(store: Store, model_id: ModelId, name: str, size: int, **changes) -> None:
    row = CheckpointRow(
        model_id=model_id,
        kind=CheckpointKind("weights"),
        name=name,
        artifact_id=ArtifactId(name),
        created_at=DAY,
        size_bytes=size,
        **changes,
    )
    store.write(lambda tx: checkpoints.put(tx, row, overwrite=False))


def put(store: Store, subject: str, name: str, value: int) -> None:
    store.write(lambda tx: quotas.put(tx, Subject.parse(subject), name, value, audit.OPERATOR, NOON))


def test_tokens_of_the_day_by_owner_key_and_project(store: Store, team: dict[str, SessionId]) -> None:
    work = [Work(kind=kind, tokens=tokens) for kind, tokens in (("training", 10), ("forward", 5), ("checkpoint", 0))]
    sampled = [Work(kind=kind, tokens=tokens) for kind, tokens in (("prefill", 3), ("prefill_cached", 100))]

    def fill(tx) -> None:
        usage.add(tx, "ann", team["keyed"], "m", DAY + 1, work)
        usage.add(tx, "ann", team["plain"], "m", DAY - 1, work)  # yesterday
        usage.add(tx, "ann", team["plain"], "", NOON, [*sampled, Work(kind="sampled", tokens=7)])
        usage.add(tx, "bob", team["bob"], "m", NOON, work)

    store.write(fill)
    assert store.read(lambda tx: quotas.count_tokens_today(tx, NOON)) == {
        (ANN, "training_tokens_per_day"): 15,
        (KEY, "training_tokens_per_day"): 15,
        (MATH, "training_tokens_per_day"): 30,
        (ANN, "sample_tokens_per_day"): 10,
        (Subject("owner", "bob"), "training_tokens_per_day"): 15,
    }
    assert store.read(lambda tx: quotas.count_tokens_today(tx, DAY + 86_400)) == {}
    assert store.read(lambda tx: quotas.find_account(tx, team["keyed"])) == Account("ann", 4, "math")
    assert store.read(lambda tx: quotas.find_account(tx, SessionId("none"))) is None


def test_models_in_training_are_those_that_have_not_ended(store: Store, team: dict[str, SessionId]) -> None:
    ready = add_model(store, team["keyed"], "0")
    for status in ("creating", "failed", "unloaded", "left", "expired"):
        add_model(store, team["keyed"], status, status)
    of_bob = add_model(store, team["bob"], "0")
    finished = add_model(store, team["plain"], "0")
    store.write(lambda tx: sessions.finish(tx, team["plain"], "success", NOON))
    found = {subject: store.read(lambda tx, s=subject: quotas.list_models_in_training(tx, s)) for subject in (ANN, KEY)}
    assert found == {ANN: [(ready, "ann")], KEY: [(ready, "ann")]}
    of_math = store.read(lambda tx: quotas.list_models_in_training(tx, MATH))
    assert set(of_math) == {(ready, "ann"), (of_bob, "bob")} and finished not in dict(of_math)


def test_bytes_of_checkpoints_that_exist(store: Store, team: dict[str, SessionId]) -> None:
    model_id = add_model(store, team["keyed"], "0")
    add_checkpoint(store, model_id, "a", 100)
    add_checkpoint(store, model_id, "gone", 1000, expires_at=NOON - 1)
    add_checkpoint(store, model_id, "deleted", 20, deleted_at=NOON - 1)
    add_checkpoint(store, add_model(store, team["bob"], "0"), "b", 7)
    sizes = [
        store.read(lambda tx, s=subject: quotas.count_checkpoint_bytes(tx, s, NOON)) for subject in (ANN, KEY, MATH)
    ]
    assert sizes == [120, 120, 127]


def test_deleted_checkpoints_are_removed_early_when_a_quota_has_no_room(
    store: Store, team: dict[str, SessionId]
) -> None:
    model_id, of_bob = add_model(store, team["keyed"], "0"), add_model(store, team["bob"], "0")
    add_checkpoint(store, model_id, "kept", 50)
    for name, deleted_at in (("older", NOON - 9), ("newer", NOON - 8)):
        add_checkpoint(store, model_id, name, 20, deleted_at=deleted_at)
    add_checkpoint(store, of_bob, "other", 20, deleted_at=NOON - 10)

    def find_refusal(value: int) -> str | None:
        rules = Rules({("owner", "checkpoint_bytes"): {"ann": Quota(ANN, "checkpoint_bytes", value)}})
        work = partial(make_room_for_checkpoint, rules=rules, session_id=team["keyed"], now=NOON, is_stored=False)
        return store.write(work)

    def list_names() -> set[str]:
        return set(store.read(lambda tx: tx.exec(select(CheckpointRow.name)).all()))

    assert find_refusal(91) is None and list_names() == {"kept", "older", "newer", "other"}
    assert find_refusal(90) is None and list_names() == {"kept", "newer", "other"}
    assert "take 50 bytes, and the quota is 50" in (find_refusal(50) or "") and list_names() == {"kept", "other"}


def test_an_owner_sees_its_own_quotas_and_those_of_its_keys_and_projects(
    store: Store, team: dict[str, SessionId]
) -> None:
    store.write(lambda tx: usage.add(tx, "ann", team["keyed"], "m", NOON, [Work(kind="training", tokens=40)]))
    for subject, name, value in (
        *(("*", "training_tokens_per_day", 100), ("bob", "training_tokens_per_day", 5)),
        *(
            ("key:4", "checkpoint_bytes", 9),
            ("project:math", "models_in_training", 2),
            ("key:9", "models_in_training", 1),
        ),
    ):
        put(store, subject, name, value)

    def read_uses(owner: str | None) -> list[tuple[str, str, int, int]]:
        found = store.read(lambda tx: quotas.read_quota_uses(tx, quotas.read_rules(tx), owner, NOON))
        return [(str(use.quota.subject), use.quota.limit, use.used, use.quota.value) for use in found]

    assert read_uses("ann") == [
        ("key:4", "checkpoint_bytes", 0, 9),
        ("ann", "training_tokens_per_day", 40, 100),
        ("project:math", "models_in_training", 0, 2),
    ]
    assert read_uses("bob") == [
        ("bob", "training_tokens_per_day", 0, 5),
        ("project:math", "models_in_training", 0, 2),
    ]
    assert ("key:9", "models_in_training", 0, 1) in read_uses(None) and len(read_uses(None)) == 5
