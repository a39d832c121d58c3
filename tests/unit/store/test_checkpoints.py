import pytest

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import (
    ArtifactId,
    CheckpointKind,
    CheckpointPath,
    ModelId,
    SamplerId,
    SamplingSessionId,
    SessionId,
)
from skyrl_tx.contract.requests import LoadWeights, LoraSpec, ModelSpec
from skyrl_tx.store import checkpoints, futures, models, sampling_sessions, sessions
from skyrl_tx.store.checkpoints import CheckpointExists
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SamplingSessionRow

MODEL = ModelId("run")


def row(name: str, artifact: str = "art-1", *, model: ModelId = MODEL, now: float = 1.0, ends: float | None = None):
    return CheckpointRow(
        model_id=model,
        kind=CheckpointKind.TRAINING,
        name=name,
        artifact_id=ArtifactId(artifact),
        created_at=now,
        expires_at=ends,
        size_bytes=2**40,
        user_metadata={"step": "3"},
    )


def path(name: str) -> CheckpointPath:
    return CheckpointPath(MODEL, CheckpointKind.TRAINING, name)


def put(store: Store, new: CheckpointRow, overwrite: bool = False) -> ArtifactId | None:
    return store.write(lambda tx: checkpoints.put(tx, new, overwrite))


def get(store: Store, name: str, now: float = 2.0) -> CheckpointRow | None:
    return store.read(lambda tx: checkpoints.get(tx, path(name), now))


def make_model(store: Store, session_id: SessionId, model_id: ModelId = MODEL) -> None:
    fields = {"session_id": session_id, "base_model": "b", "spec": b"", "created_at": 1.0, "last_request_at": 1.0}
    store.write(lambda tx: models.create(tx, ModelRow(model_id=model_id, **fields)))


def test_a_checkpoint_is_found_by_its_path(store: Store) -> None:
    assert put(store, row("a")) is None
    found = get(store, "a")
    assert (found.artifact_id, found.size_bytes, found.user_metadata, found.public) == (
        "art-1",
        2**40,
        {"step": "3"},
        False,
    )
    assert found.path == path("a")
    assert get(store, "b") is None
    other_kind = CheckpointPath(MODEL, CheckpointKind.SAMPLER, "a")
    assert store.read(lambda tx: checkpoints.get(tx, other_kind, 2.0)) is None


def test_a_name_is_overwritten_only_on_request(store: Store) -> None:
    put(store, row("a", "art-1"))
    with pytest.raises(CheckpointExists, match="tinker://run/weights/a exists"):
        put(store, row("a", "art-2"))
    assert get(store, "a").artifact_id == "art-1"
    assert put(store, row("a", "art-2"), overwrite=True) == "art-1"
    assert get(store, "a").artifact_id == "art-2"


def test_an_expired_name_is_free(store: Store) -> None:
    put(store, row("a", "art-1", ends=5.0))
    assert get(store, "a", now=4.9) is not None
    assert get(store, "a", now=5.0) is None
    assert put(store, row("a", "art-2", now=5.0)) == "art-1"
    assert get(store, "a", now=100.0).artifact_id == "art-2"


def test_expire_deletes_expired_checkpoints(store: Store) -> None:
    for name, ends in (("a", 5.0), ("b", 6.0), ("c", None)):
        put(store, row(name, ends=ends))
    assert store.write(lambda tx: checkpoints.expire(tx, 5.5)) == [path("a")]
    store.write(lambda tx: checkpoints.set_ttl(tx, path("b"), None))
    store.write(lambda tx: checkpoints.set_ttl(tx, path("c"), 7.0))
    assert store.write(lambda tx: checkpoints.expire(tx, 8.0)) == [path("c")]
    assert get(store, "b", now=1e9) is not None


def test_delete_and_publish(store: Store) -> None:
    put(store, row("a"))
    store.write(lambda tx: checkpoints.set_public(tx, path("a"), True))
    assert get(store, "a").public
    assert store.write(lambda tx: checkpoints.delete(tx, path("a")))
    assert not store.write(lambda tx: checkpoints.delete(tx, path("a")))
    for change in (
        lambda tx: checkpoints.set_public(tx, path("a"), True),
        lambda tx: checkpoints.set_ttl(tx, path("a"), 1.0),
    ):
        with pytest.raises(LookupError, match="no CheckpointRow has the key"):
            store.write(change)


def test_the_newest_checkpoints_are_kept(store: Store, session_id: SessionId) -> None:
    """Published checkpoints and those with a TTL stay, and so do other kinds."""
    make_model(store, session_id)
    for number in range(6):
        put(store, row(f"c{number}", now=float(number), ends=99.0 if number == 1 else None))
    put(store, CheckpointRow(**{**row("other").model_dump(), "kind": CheckpointKind.SAMPLER}))
    store.write(lambda tx: checkpoints.set_public(tx, path("c2"), True))

    def trim(keep: int) -> list[str]:
        kind = CheckpointKind.TRAINING
        return [found.name for found in store.write(lambda tx: checkpoints.trim(tx, MODEL, kind, keep, 9.0))]

    assert trim(0) == [] and trim(2) == ["c3", "c0"] and trim(2) == []
    left = store.read(lambda tx: checkpoints.list_by_run(tx, MODEL, 9.0))
    assert {found.name for found in left} == {"other", "c1", "c2", "c4", "c5"}
    assert store.write(lambda tx: checkpoints.undelete(tx, path("c3")))


@pytest.mark.parametrize(
    ("of_session", "of_run", "kept"),
    [(None, None, 7), ("3", None, 3), ("3", "2", 2), ("3", "all", 0), (4, None, 4), ("many", None, 0)],
)
def test_metadata_says_how_many_checkpoints_are_kept(
    store: Store, of_session: object, of_run: str | None, kept: int
) -> None:
    """The server refused other values only since a later release, and keeps all checkpoints then."""
    key = checkpoints.KEEP_LAST
    metadata = {} if of_session is None else {key: of_session}
    session_id = store.write(lambda tx: sessions.create(tx, owner="ann", user_metadata=metadata, now=1.0))
    make_model(store, session_id)
    if of_run is not None:
        store.write(lambda tx: setattr(models.get(tx, MODEL), "user_metadata", {key: of_run}))
    assert store.read(lambda tx: checkpoints.find_keep_last(tx, MODEL, 7)) == kept


def test_lists_show_unexpired_checkpoints_of_the_owner(store: Store, session_id: SessionId) -> None:
    theirs = store.write(lambda tx: sessions.create(tx, owner="bob", now=1.0))
    make_model(store, session_id)
    make_model(store, theirs, ModelId("theirs"))
    put(store, row("x", model=ModelId("theirs")))
    put(store, row("expired", ends=2.0))
    for number in range(3):
        put(store, row(f"c{number}", now=float(number)))
    run = store.read(lambda tx: checkpoints.list_by_run(tx, MODEL, 3.0))
    page, total = store.read(lambda tx: checkpoints.list_owned(tx, "ann", 2, 1, 3.0))
    assert [found.name for found in run] == ["c0", "c1", "c2"]
    assert ([found.name for found, _ in page], total) == (["c1", "c0"], 3)


def load(artifact: str) -> bytes:
    spec = ModelSpec(lora=LoraSpec(rank=4, seed=1))
    return codec.encode(
        LoadWeights(
            path="tinker://a/weights/b", artifact_id=ArtifactId(artifact), spec=spec, optimizer=True, create=False
        )
    )


def test_referenced_artifacts(store: Store, session_id: SessionId) -> None:
    make_model(store, session_id)
    put(store, row("a", "art-checkpoint"))
    store.write(lambda tx: models.put_snapshot(tx, MODEL, ArtifactId("art-snapshot"), 1, 1.0))
    sampling = SamplingSessionRow(
        sampling_session_id=SamplingSessionId("s"),
        session_id=session_id,
        base_model="b",
        sampler_id=SamplerId("art-sampler"),
        created_at=1.0,
        last_used_at=1.0,
    )
    on_base = SamplingSessionRow(
        sampling_session_id=SamplingSessionId("base"),
        session_id=session_id,
        base_model="b",
        created_at=1.0,
        last_used_at=1.0,
    )
    store.write(
        lambda tx: (sampling_sessions.create_session(tx, sampling), sampling_sessions.create_session(tx, on_base))
    )
    assert store.read(checkpoints.find_referenced_artifacts) == {"art-checkpoint", "art-snapshot", "art-sampler"}

    store.write(lambda tx: checkpoints.delete(tx, path("a")))
    store.write(lambda tx: models.delete_snapshot(tx, MODEL))
    assert store.read(checkpoints.find_referenced_artifacts) == {"art-sampler"}


def test_a_load_references_its_source_until_a_snapshot_covers_it(store: Store, session_id: SessionId) -> None:
    make_model(store, session_id)
    new = futures.NewRequest(
        key="load", kind="load_weights", owner="ann", session_id=session_id, body=load("art-source"), model_id=MODEL
    )
    request_id = store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id
    assert store.read(checkpoints.find_referenced_artifacts) == {"art-source"}, "open"
    store.write(lambda tx: futures.complete(tx, request_id, b"r", failed=False, effect_order=1, now=2.0))
    assert store.read(checkpoints.find_referenced_artifacts) == {"art-source"}, "a recovery would replay it"
    store.write(lambda tx: models.put_snapshot(tx, MODEL, ArtifactId("art-snapshot"), 1, 1.0))
    assert store.read(checkpoints.find_referenced_artifacts) == {"art-snapshot"}
    store.write(lambda tx: models.delete_snapshot(tx, MODEL))
    store.write(lambda tx: models.set_status(tx, MODEL, "unloaded"))
    assert store.read(checkpoints.find_referenced_artifacts) == set()
