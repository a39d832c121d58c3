from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow


def publish(store: Store, detail: str, now: float) -> None:
    row = EngineStateRow(
        boot_id="boot",
        pid=7,
        status="ready",
        capabilities={"max_context_length": 64, "devices": ["cpu"]},
        base_models=["tiny"],
        detail=detail,
        updated_at=now,
    )
    store.write(lambda tx: engine_state.publish(tx, row))


def test_the_latest_status_is_visible_to_the_api(open_store) -> None:
    api, engine = open_store("api"), open_store("engine")
    assert api.read(engine_state.get) is None
    publish(engine, "compiling", 1.0)
    publish(engine, "", 2.0)
    row = api.read(engine_state.get)
    assert (row.boot_id, row.pid, row.status, row.detail, row.updated_at) == ("boot", 7, "ready", "", 2.0)
    assert (row.capabilities, row.base_models) == ({"max_context_length": 64, "devices": ["cpu"]}, ["tiny"])
