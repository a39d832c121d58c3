"""Owners take turns at the threads that check and follow grammars."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from skyrl_tx.grammars import FairThreads


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_the_work_of_one_owner_does_not_use_all_threads(gate: threading.Event) -> None:
    threads = FairThreads(2, 1, "test")
    slow = [threads.submit("ann", lambda: gate.wait(60)) for _ in range(20)]
    assert threads.submit("bob", lambda: "done").result(30) == "done"
    assert not any(future.done() for future in slow)
    gate.set()
    assert all(future.result(30) for future in slow)


def test_owners_take_turns_and_the_work_of_each_starts_in_order(gate: threading.Event) -> None:
    threads, order = FairThreads(1, 1, "test"), list[str]()

    def write(text: str) -> Callable[[], None]:
        return lambda: order.append(text)

    first = threads.submit("ann", lambda: gate.wait(60))
    futures = [threads.submit(owner, write(f"{owner}{n}")) for owner in ("ann", "bob", "eve") for n in range(3)]
    gate.set()
    for future in (first, *futures):
        future.result(30)
    assert [text[-1] for text in order] == list("000111222")
    assert {text[:-1] for text in order[:3]} == {"ann", "bob", "eve"}


def test_errors_reach_the_caller_and_the_rest_still_runs() -> None:
    threads = FairThreads(1, 1, "test")

    def fail() -> None:
        raise ValueError("broken")

    failed, good = threads.submit("ann", fail), threads.submit("ann", lambda: 1)
    with pytest.raises(ValueError, match="broken"):
        failed.result(30)
    assert good.result(30) == 1


def test_closing_cancels_what_has_not_started(gate: threading.Event) -> None:
    threads = FairThreads(1, 1, "test")
    has_started = threading.Event()
    running = threads.submit("ann", lambda: (has_started.set(), gate.wait(60))[1])
    waiting = threads.submit("ann", lambda: 1)
    assert has_started.wait(30)
    threads.close()
    threads.close()
    gate.set()
    assert running.result(30)
    with pytest.raises(CancelledError):
        waiting.result(30)


def test_many_submissions_of_many_owners_all_run() -> None:
    threads = FairThreads(3, 2, "test")
    futures = [threads.submit(f"owner-{n % 7}", lambda n=n: n) for n in range(2000)]
    assert [future.result(30) for future in futures] == list(range(2000))
