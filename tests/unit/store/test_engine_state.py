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


def row(number: int, status: str = "ready", updated_at: float = 100.0, meters: object = None) -> EngineStateRow:
    return EngineStateRow(
        number=number,
        boot_id=f"boot {number}",
        pid=number,
        status=status,
        capabilities={},
        base_models=[],
        meters=meters,
        updated_at=updated_at,
    )


def test_the_main_engine_is_one_that_executes_requests() -> None:
    assert engine_state.choose_main_engine([]) is None
    rows = [row(1, updated_at=50.0), row(2, "starting", 101.0), row(3, updated_at=99.0)]
    assert engine_state.choose_main_engine(rows).number == 3
    assert engine_state.choose_main_engine(rows[:2]).number == 2, "one that was ready once is silent now"


def test_meters_of_several_engines_are_added() -> None:
    assert engine_state.sum_meters([]) is None and engine_state.sum_meters([row(1)]) is None
    one, other = (
        {"totals": {"a": n, "b": 0.5}, "devices": [n], "name": "x", "trainer_gap_max_nats": n / 8} for n in (1, 2)
    )
    rows = [row(1, meters=one), row(2, meters=other | {"more": 3}), row(3, updated_at=1.0, meters=one)]
    expected = {"totals": {"a": 3, "b": 1.0}, "devices": [1, 2], "name": "x", "more": 3, "trainer_gap_max_nats": 0.25}
    assert engine_state.sum_meters(rows) == expected, "an engine that has ended does not count"


def test_an_engine_is_known_by_its_run(open_store) -> None:
    store = open_store("api")
    for found in (row(1), row(2)):
        store.write(lambda tx, found=found: engine_state.publish(tx, found))
    assert store.read(lambda tx: engine_state.find_number(tx, "boot 2")) == 2
    assert store.read(lambda tx: engine_state.find_number(tx, "boot 3")) is None
    assert engine_state.make_boot_id() != engine_state.make_boot_id()
