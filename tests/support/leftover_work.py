"""Work that tests leave behind: threads that still run, and tasks of clients in the SDK's background loop.

Such work takes time from later tests and changes what they see, for example the state of the global `random`, from
which the SDK's retries draw their delays.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Set

from skyrl_tx.process.signals import ServiceThread

CANCEL_ROUNDS = 8
"""The SDK's retry loops may mistake one cancellation for a lost connection and continue."""

_AS_LONG_AS_THE_PROCESS = ("signals", "undo-attempts")
"""Service threads that are idle, and end with their process only.

For example, `undo-attempts` waits for the stop of an engine, which never comes after a test lost its device.
"""

_JOIN_S = 20.0
"""For threads that have been asked to stop, on a busy machine."""


def find_threads() -> set[threading.Thread]:
    """Return the service threads that run, and all threads that would keep the process alive.

    Idle threads in the pool of an asyncio loop end with that loop, and the SDK's loop runs to the end of the process.
    """
    return {
        thread
        for thread in threading.enumerate()
        if isinstance(thread, ServiceThread) or not (thread.daemon or thread.name.startswith("asyncio_"))
        if thread.name not in _AS_LONG_AS_THE_PROCESS
    }


def find_leftover_threads(before: Set[threading.Thread]) -> list[str]:
    """Return the names of threads that started since `before` was found, and do not end."""
    started = find_threads() - before
    end = time.monotonic() + _JOIN_S
    for thread in started:
        thread.join(max(end - time.monotonic(), 0.0))
    return sorted(thread.name for thread in started if thread.is_alive())


def cancel_tasks_of_clients() -> None:
    """Cancel what clients of the SDK that no test closed still do in this process, such as their heartbeats."""
    holder = sys.modules.get("tinker.lib.internal_client_holder")
    background = holder and holder._internal_client_holder_thread_singleton
    if not background or background._thread is None:
        return

    async def cancel_all() -> None:
        for _ in range(CANCEL_ROUNDS):
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=2)
        print("still running in the SDK's loop:", *tasks, sep="\n  ", file=sys.stderr)

    with contextlib.suppress(TimeoutError):  # then the loop itself hangs, and is left as it is
        asyncio.run_coroutine_threadsafe(cancel_all(), background.get_loop()).result(timeout=300)


def stop_loop_of_clients() -> None:
    """Stop the SDK's background loop, where clients that no test closed still send heartbeats.

    A callback of its native transport into an interpreter that is shutting down aborts the process.
    """
    holder = sys.modules.get("tinker.lib.internal_client_holder")
    background = holder and holder._internal_client_holder_thread_singleton
    if not background or background._thread is None:
        return
    cancel_tasks_of_clients()
    loop = background.get_loop()
    loop.call_soon_threadsafe(loop.stop)
    background._thread.join(timeout=30)
