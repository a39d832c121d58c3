"""Histories with special clients. Each tests a guarantee that training alone does not cover."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyrl_tx.server.routes import futures, runs, sampling
from tests.support.simulation.clients import Client, train
from tests.support.simulation.world import Lost

if TYPE_CHECKING:
    from tests.support.simulation.history import History

_SETTLE_S = 60.0
_FLOOD_S = 8.0
_FLOOD_PERIOD_S = 0.1
_FLOOD_TOKENS = 5
_MOST_REFUSALS = 5
_NUM_CROWDED = 8
_MOST_PASSED = 10
_NUM_RUNS = 4


def lose_database(history: "History") -> None:
    """Replace the database by an older copy, or by an empty one. The weights of named saves must stay on the disk."""
    world, scheduler = history.world, history.world.scheduler
    history.add_client("ann", train)
    images = [world.database.template]
    for _ in range(6):
        scheduler.sleep(scheduler.random.uniform(0.2, 1.5))
        images.append(world.database.image())
    world.faults.stop()
    if not history.wait_for_clients(_SETTLE_S):
        return
    history.note_artifacts()
    _stop_server(history)
    world.trace("FAULT the database is replaced by an older one")
    world.database.replace(scheduler.random.choice(images))
    scheduler.wall_offset += 3600.0
    world.start()
    scheduler.sleep(2.5 * world.engine_settings.housekeeping_interval_s)
    present = {path.name for path in world.data_dir.rglob("*") if path.is_dir()}
    for path, artifact_id in history.artifacts.items():
        if not any(str(artifact_id) in name for name in present):
            history.violate(f"the files of {path} were removed, because an older database does not name them")


def _stop_server(history: "History") -> None:
    world, scheduler = history.world, history.world.scheduler
    world.is_over = True  # nothing is restarted
    for process in [api.process for api in world.apis] + ([world.engine.process] if world.engine else []):
        scheduler.end(process)
        scheduler.bury(process)
    world.end_supervisor()
    world.is_over = False


def flood(history: "History") -> None:
    """One owner sends samples as fast as it may. Another one's sample must be accepted soon."""
    world, scheduler = history.world, history.world.scheduler
    world.faults.network.heal()
    end = scheduler.monotonic + _FLOOD_S

    def send_many(client: Client) -> None:
        name = client.sampling_session(None)
        number = 0
        while scheduler.monotonic < end:
            number += 1
            body = _prompt(name, number, max_tokens=_FLOOD_TOKENS)
            try:
                world.call(client.key, sampling.asample, body)
            except Lost:
                continue
            scheduler.sleep(_FLOOD_PERIOD_S)

    def send_politely(client: Client) -> None:
        name = client.sampling_session(None)
        scheduler.sleep(_FLOOD_S / 2)
        num_refused = 0
        while True:
            status, answer = world.call(client.key, sampling.asample, _prompt(name, 0, max_tokens=1))
            if status == 200:
                return
            num_refused += status == 429
            if num_refused > _MOST_REFUSALS or status not in (429, 503):
                client.violate(f"its only sample is refused for the {num_refused}th time: {status} {answer}")
            scheduler.sleep(1.0)

    history.add_client("ann", send_many)
    history.add_client("bob", send_politely)
    history.wait_for_clients(_SETTLE_S)


def _prompt(name: str, number: int, *, max_tokens: int) -> dict[str, object]:
    return {
        **{"sampling_session_id": name, "seq_id": number, "num_samples": 1},
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": max_tokens, "seed": 1, "stop": []},
    }


def crowd(history: "History") -> None:
    """One owner samples in many sessions. The samples of another owner's one session must get every second turn."""
    world, scheduler = history.world, history.world.scheduler
    draw = scheduler.random
    acknowledged: list[str] = []

    def send(client: Client, count: int) -> None:
        name = client.sampling_session(None)
        for number in range(count):
            body = _prompt(name, number, max_tokens=draw.choice((8, 12)))
            acknowledged.append(client.call(sampling.asample, body)["request_id"])

    def send_two(client: Client) -> None:
        while len(acknowledged) < 2 * _NUM_CROWDED:
            scheduler.sleep(0.01)
        first = _num_completed(history)
        name = client.sampling_session(None)
        asked = [client.call(sampling.asample, _prompt(name, number, max_tokens=8)) for number in range(3)]
        for promise in asked:
            client.call(futures.retrieve_future, {"request_id": promise["request_id"]})
        orders = "SELECT answer_order FROM requests WHERE request_id = ?"
        last = max(world.database.rows(orders, promise["request_id"])[0][0] for promise in asked)
        num_passed = _num_completed(history, last) - first - len(asked)
        if num_passed > _MOST_PASSED:
            client.violate(f"{num_passed} samples of another owner ended before its {len(asked)}")

    for _ in range(_NUM_CROWDED):
        history.add_client("ann", lambda client: send(client, 2))
    history.add_client("bob", send_two)
    history.wait_for_clients(_SETTLE_S)


def _num_completed(history: "History", last: int = sys.maxsize) -> int:
    # Rows are counted, because the counter itself jumps forward when an engine starts.
    completed = "SELECT count(*) FROM requests WHERE answer_order IS NOT NULL AND answer_order <= ?"
    return history.world.database.rows(completed, last)[0][0]


def read_pages(history: "History") -> None:
    """Read the list of runs page by page while the runs are used. Each must be listed."""
    scheduler = history.world.scheduler

    def program(client: Client) -> None:
        models = [client.create_model() for _ in range(_NUM_RUNS)]
        for model in models:
            model.log[0].is_done.wait()
            scheduler.sleep(1.5)
        listed: set[str] = set()
        for offset in range(0, _NUM_RUNS, 2):
            page = client.call(runs.list_runs, None, limit=2, offset=offset)
            listed |= {run["training_run_id"] for run in page["training_runs"]}
            sent = client.send(client.new_pass(scheduler.random.choice(models), first_token=None))
            sent.is_done.wait()
            scheduler.sleep(1.5)
        if missing := {model.model_id for model in models} - listed:
            client.violate(f"{len(missing)} of {_NUM_RUNS} runs are on no page")

    history.add_client("ann", program)
    history.wait_for_clients(_SETTLE_S)


def check_recovery_of_device(history: "History", most_failures: int) -> None:
    """After a device was sick, few requests may have failed, and new ones must succeed."""
    failed = [sent for client in history.clients for sent in client.all_sent() if sent.has_failed]
    if history.world.faults.sick_at is not None and len(failed) > most_failures:
        history.violate(f"{len(failed)} requests failed on a sick device")

    def program(client: Client) -> None:
        for _ in range(8):
            model = client.create_model()
            model.log[0].is_done.wait()
            if not model.log[0].has_failed:
                sent = client.send(client.new_pass(model))
                sent.is_done.wait()
                if not sent.has_failed:
                    return
            client.scheduler.sleep(1.0)
        client.violate("the device stays sick: nothing has succeeded in eight attempts")

    for owner in ("ann", "bob"):
        history.add_client(owner, program)
    history.wait_for_clients(_SETTLE_S)


ALONE: dict[str, Callable[["History"], None]] = {
    "old_database": lose_database,
    "greedy_owner": flood,
    "crowd": crowd,
    "pages": read_pages,
}
