"""Clients train over a line that drops, cuts, repeats, delays and dribbles: nothing is lost, nothing is done twice."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from skyrl_tx.testing.chaos import Line, Outcome, differences, fake_server, run
from skyrl_tx.testing.faulty_line import FAULTS, FaultyLine, Schedule, faulty_line

# The SDK leaves its connections to the garbage collector, and warns of names of its own that it will drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
EACH = {
    ("create_session", 1): "lose answer",
    ("create_model", 1): "lose answer",
    ("forward_backward", 1): "lose answer",
    ("forward_backward", 3): "repeat",
    ("forward_backward", 5): "cut request",
    ("forward_backward", 7): "drop",
    ("forward_backward", 9): "delay",
    ("optim_step", 1): "repeat",
    ("optim_step", 3): "cut answer",
    ("retrieve_future", 3): "cut answer",
    ("retrieve_future", 6): "slow answer",
    ("retrieve_future", 9): "lose answer",
    ("save_weights", 1): "repeat",
    ("save_weights_for_sampler", 1): "lose answer",
    ("save_weights_for_sampler", 3): "repeat",
    ("asample", 1): "lose answer",
    ("asample", 4): "repeat",
    ("load_weights", 1): "lose answer",
}


@pytest.fixture(autouse=True)
def _client_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield


@pytest.fixture(scope="module")
def calm() -> Outcome:
    return run(fake_server(), 1, [])


def through(schedule: Schedule, lines: list[FaultyLine]) -> Line:
    """A line with faults; it is noted in `lines`."""

    @contextmanager
    def open_line(url: str) -> Generator[str]:
        with faulty_line(url, schedule) as line:
            lines.append(line)
            yield line.url

    return open_line


def test_each_fault_changes_no_bit(calm: Outcome) -> None:
    lines: list[FaultyLine] = []
    found = run(fake_server(), 1, [], through(lambda path, nth: EACH.get((path, nth)), lines))
    assert differences(found, calm) == []
    done = lines[0].done
    assert {fault for fault, _ in done} == set(FAULTS), done
    assert done.total() >= 16, done
