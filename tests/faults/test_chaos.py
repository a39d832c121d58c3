"""Results are bit-equal when the API and the engine are killed at random times and at every crash point."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.process import failpoints
from skyrl_tx.process.failpoints import Point, failpoint
from tests.support.chaos.processes import API_POINTS, ENGINE_POINTS, Kill, random_kills
from tests.support.chaos.runs import Outcome, Server, fake_server, find_differences, jax_server, run
from tests.support.postgresql_server import PostgresqlServer
from tests.support.with_constants import constants

# The SDK leaves closing connections to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Threads of the SDK use `random` while hypothesis generates data.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]
_TIME = st.floats(0.05, 0.8)
KILLS = st.one_of(
    st.builds(lambda victim, after_s: Kill(victim, None, after_s=after_s), st.sampled_from(["engine", "both"]), _TIME),
    st.builds(lambda point, nth: Kill("engine", point, nth), st.sampled_from(ENGINE_POINTS), st.integers(1, 6)),
    st.builds(lambda point, nth: Kill("api", point, nth), st.sampled_from(API_POINTS), st.integers(1, 6)),
)


@pytest.fixture(autouse=True)
def _client_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield


@pytest.fixture(scope="module")
def calm_outcomes() -> dict[int, Outcome]:
    """The outcomes of one and two tenants on an undisturbed server."""
    return {num_tenants: run(fake_server(), num_tenants, []) for num_tenants in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("num_tenants", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_random_kills_change_no_bit(calm_outcomes: dict[int, Outcome], num_tenants: int) -> None:
    @settings(max_examples=3, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(KILLS, min_size=5, max_size=8))
    def check(kills: list[Kill]) -> None:
        found = run(fake_server(), num_tenants, kills)
        note(f"killed: {found.done}")
        assert find_differences(found, calm_outcomes[num_tenants]) == []

    check()


@pytest.mark.slow
def test_history_of_a_run_is_there_to_compare(calm_outcomes: dict[int, Outcome]) -> None:
    found = Counter(row.split()[0] for row in calm_outcomes[1].history.elements())
    assert found["point"] >= 40 and found["kept"] == 20 and found["usage"] >= 4 and found["steps"] == 2, found
    assert found["audit"] >= found["saved"] > 0, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=pytest.mark.exhaustive if index % 4 else ())
        for index, point in enumerate(ENGINE_POINTS)
    ],
)
def test_a_kill_at_each_crash_point_changes_no_bit(calm_outcomes: dict[int, Outcome], point: Point) -> None:
    # A replay needs an earlier crash, with log records after the newest snapshot.
    first = [Kill("engine", "engine.answer", 8)] if point.startswith("replay") else []
    # A slow machine needs longer to reach a crash point, and a kill at another point would prove
    # nothing. A snapshot by time would leave nothing to replay, so replay points use a long
    # interval.
    server = fake_server()
    flags = constants("engine", snapshot_interval_s=3600) if first else ()
    patient = replace(server, slowness=8.0, engine_flags=(*server.engine_flags, *flags))
    found = run(patient, 1, [*first, Kill("engine", point), Kill("engine", point, 2)])
    assert found.done["engine", point] >= 1, found.done
    assert find_differences(found, calm_outcomes[1]) == []


@pytest.mark.slow
def test_kills_on_postgresql_change_no_bit(calm_outcomes: dict[int, Outcome], postgresql: PostgresqlServer) -> None:
    """The results equal undisturbed runs on SQLite."""
    kills = [
        Kill("engine", "engine.answer", 4),
        Kill("api", "store.commit", 6),
        Kill("engine", "store.commit", 9),
        Kill("both", None, after_s=0.4),
        Kill("engine", "store.committed", 9),
    ]
    for num_tenants in (1, 2):
        found = run(fake_server(postgresql.new_database()), num_tenants, kills)
        assert found.done.total() >= 3, found.done
        assert find_differences(found, calm_outcomes[num_tenants]) == []


def check_several_engines(server: Server, num_tenants: int, kills: list[Kill], postgresql: PostgresqlServer) -> Outcome:
    """Compare runs on four engines with kills, which share a database, with an undisturbed run on one engine."""
    undisturbed = run(server, num_tenants, [])
    found = run(replace(server, database_url=postgresql.new_database(), num_engines=4), num_tenants, kills)
    assert found.done.total() >= 3, found.done
    assert find_differences(found, undisturbed) == []
    return found


@pytest.mark.slow
def test_kills_of_engines_that_give_each_other_samples_change_no_bit(postgresql: PostgresqlServer) -> None:
    """With one slot, a client's second request waits for seconds while another engine is idle."""
    server = replace(fake_server(step_delay_s=0.05, slice_tokens=1, sample_slots=1), slowness=10.0)
    found = check_several_engines(server, 2, random_kills(seed=5, num_kills=12), postgresql)
    assert found.num_given >= 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kills_of_several_engines_change_no_bit(postgresql: PostgresqlServer) -> None:
    check_several_engines(fake_server(), 4, random_kills(seed=2, num_kills=16), postgresql)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kills_of_several_engines_with_many_tenants_change_no_bit(postgresql: PostgresqlServer) -> None:
    check_several_engines(fake_server(), 40, random_kills(seed=3, num_kills=48), postgresql)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kills_of_several_engines_on_the_jax_backend_change_no_bit(
    tmp_path: Path, postgresql: PostgresqlServer
) -> None:
    check_several_engines(jax_server(tmp_path), 3, random_kills(seed=4, num_kills=10), postgresql)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kills_on_the_jax_backend_change_no_bit(tmp_path: Path) -> None:
    """CI kills the JAX backend in tests/serve."""
    server = jax_server(tmp_path)
    undisturbed = run(server, 1, [])
    found = run(server, 1, random_kills(seed=3, num_kills=5))
    assert found.done.total() >= 3, found.done
    assert find_differences(found, undisturbed) == []


def test_comparison_finds_all_differences() -> None:
    one = Outcome(transcripts=[[("a", 1.0)]], kinds=Counter(), weights=["w 1"], num_open=0, num_repeated=0)
    other = Outcome(transcripts=[[("a", 1.5)]], kinds=Counter(), weights=["w 2"], num_open=1, num_repeated=1)
    assert find_differences(one, one) == []
    assert find_differences(replace(one, history=Counter(["point 0"])), one) == ["history: 1 times, not 0: point 0"]
    text = "\n".join(find_differences(other, one))
    assert "tenant 0, line 0" in text and "weights" in text and "1 futures open, 1 models" in text


def test_schedule_contains_each_crash_point_once_before_any_repeats() -> None:
    kills = random_kills(seed=5, num_kills=200)
    points = [kill.point for kill in kills if kill.victim == "engine" and kill.point is not None]
    rounds = [points[start : start + len(ENGINE_POINTS)] for start in range(0, len(points), len(ENGINE_POINTS))]
    assert len(rounds) > 3 and all(set(crash_points) == set(ENGINE_POINTS) for crash_points in rounds[:-1])
    assert {kill.victim for kill in kills} == {"engine", "api", "both"}
    first = [next(kill for kill in random_kills(seed, 20) if kill.victim == "engine").point for seed in range(200)]
    assert not any(point and point.startswith("replay") for point in first), (
        "no request was executed that could be replayed"
    )
    assert all(kill.point is None or kill.point in API_POINTS for kill in kills if kill.victim == "api")


def test_failpoint_counts_only_its_own_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "store.commit:3")
    for point in get_args(Point):
        failpoint(point)
    assert os.environ[failpoints.VARIABLE] == "store.commit:2"


def test_a_kill_during_removal_leaves_no_partial_artifact(tmp_path: Path) -> None:
    store = LocalArtifacts(tmp_path)
    artifact = store.create(lambda folder: (folder / "a.json").write_text("1") and None)
    program = (
        f"from pathlib import Path; from skyrl_tx.artifacts import LocalArtifacts as S; S(Path({str(tmp_path)!r}))"
    )

    killed = subprocess.run(
        [sys.executable, "-c", f"{program}.collect([], min_age_s=0)"],
        env={**os.environ, failpoints.VARIABLE: "artifact.collect:1"},
        check=False,
        timeout=30,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not store.has(artifact.artifact_id) and len(list(tmp_path.iterdir())) == 1
    assert store.collect([], min_age_s=0) == [] and list(tmp_path.iterdir()) == []
