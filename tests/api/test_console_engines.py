"""The health page shows the models of each engine."""

import re
import time
from collections.abc import Iterator

import pytest
from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store import engine_state, models, sessions
from skyrl_tx.store.tables import EngineStateRow, ModelRow
from tests.support.console_world import ConsoleWorld, console_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as world:
        world.key("root", "admin")
        yield world


def add_ended_engine(tx: Session) -> None:
    """Add an engine that ended long ago and has no models."""
    row = EngineStateRow(
        number=3, boot_id="c", host="gpu-8", pid=4712, status="ready", capabilities={}, base_models=[], updated_at=1.0
    )
    engine_state.publish(tx, row)


def add_engine(tx: Session) -> dict[str, ModelId]:
    """Add a second engine with models of two owners."""
    row = EngineStateRow(
        number=2,
        boot_id="b",
        host="gpu-7",
        pid=4711,
        status="ready",
        capabilities={"devices": ["H100 <1>"]},
        base_models=[],
        updated_at=time.time() + 3600,  # stays current without publishing again
    )

    engine_state.publish(tx, row)
    names: dict[str, ModelId] = {}

    for owner in ("ann", "bob"):
        session_id = sessions.create(tx, owner=owner, now=time.time())
        names[owner] = ModelId(f"{session_id}:train:0")
        now = time.time()

        model = ModelRow(
            model_id=names[owner],
            session_id=session_id,
            base_model="fake",
            spec=b"",
            status="ready",
            created_at=now,
            last_request_at=now,
            engine=2,
        )

        models.create(tx, model)
        tx.flush()

    return names


def test_several_engines_are_listed_with_what_they_hold(world: ConsoleWorld) -> None:
    with world.browser(world.key("ann")) as ann, world.browser(world.key("root", "admin")) as root:
        assert ">Engines<" not in ann.get("/health").text, "one engine is described above"
        world.server.store.write(add_ended_engine)
        alone = ann.get("/health").text
        assert ">Engines<" in alone and "gpu-8" not in alone, "the models of the remaining engine are still shown"
        names = world.server.store.write(add_engine)
        pages = {"ann": ann.get("/health").text, "root": root.get("/health").text}

    for page in pages.values():
        (line,) = (row for row in re.findall(r"<tr><td>.*?</tr>", page, re.DOTALL) if "gpu-7, process 4711" in row)
        assert "<td>2</td>" in line and "<td>ready" in line and "H100 &lt;1&gt;" in line
        assert '<td class="num">2</td>' in line, "models of all owners count"
    assert names["ann"] in pages["ann"] and names["bob"] not in pages["ann"]
    assert names["ann"] in pages["root"] and names["bob"] in pages["root"]
