"""Signal handlers, and the stack traces that SIGQUIT writes."""

import os
import signal
import subprocess
import sys
import threading

from skyrl_tx.process.signals import describe_stacks, handle_signals

BUSY_PROCESS = """
import os, signal, sys, threading
from skyrl_tx.process.signals import enable_stack_dumps

enable_stack_dumps()

def descend(depth: int) -> None:
    if depth:
        descend(depth - 1)

def work() -> None:
    while True:
        descend(50)

for _ in range(4):
    threading.Thread(target=work, name="worker", daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_stacks_are_written_whole_while_threads_run() -> None:
    """A `faulthandler` handler would read stacks while they change and crash processes like this one."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"

        for _ in range(30):
            process.send_signal(signal.SIGQUIT)
            headers = (line for line in process.stderr if line.startswith("Thread"))
            threads = [header.split('"')[1] for _, header in zip(range(6), headers, strict=False)]
            assert sorted(threads) == ["MainThread", "signals", *["worker"] * 4]

        process.stdin.close()
        assert process.wait(30) == 0


def test_a_handler_runs_while_the_main_thread_is_busy_and_ends_with_its_block() -> None:
    received = threading.Event()
    before = signal.getsignal(signal.SIGUSR1)
    with handle_signals({signal.SIGUSR1}, lambda _: received.set()):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received.wait(30)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_stack_of_a_thread_begins_with_its_first_call_although_it_returns_from_others() -> None:
    is_ended = threading.Event()

    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)

    def work() -> None:
        while not is_ended.is_set():
            descend(30)

    threads = [threading.Thread(target=work, name="busy") for _ in range(3)]
    interval = sys.getswitchinterval()
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            stacks = [part for part in describe_stacks().split('Thread "') if part.startswith("busy")]
            assert len(stacks) == 3 and all("in _bootstrap\n" in stack and "in work\n" in stack for stack in stacks)
    finally:
        is_ended.set()
        for thread in threads:
            thread.join()
    assert sys.getswitchinterval() == interval
