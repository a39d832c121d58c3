"""Threads that a process cannot run without."""

import subprocess
import sys

import pytest

from skyrl_tx.process import signals
from skyrl_tx.process.signals import EXIT_STATUS, ServiceThread

DYING = """
import logging, time
from skyrl_tx.process.signals import ServiceThread, end_process_on_failure

def work():
    raise OSError(5, "Input/output error")

logging.basicConfig()
end_process_on_failure()
ServiceThread("watcher", work).start()
time.sleep(60)
"""


def test_death_of_a_thread_ends_the_process_with_its_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == EXIT_STATUS
    assert "the thread 'watcher' ended" in done.stderr and "OSError: [Errno 5] Input" in done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_death_of_a_thread_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(signals, "_failures", signals._Failures())

    def work() -> None:
        raise ValueError("no such row")

    for name, target in (("fine", lambda: None), ("first", work), ("second", work)):
        thread = ServiceThread(name, target)
        thread.start()
        thread.join()
    assert signals.get_failure() == "the thread 'first' ended: ValueError: no such row"
    assert caplog.text.count("Traceback") == 2
