"""Tests for the background file writer."""

import threading
from collections.abc import Iterator

import pytest

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.engine.activity import LoopActivity
from skyrl_tx.engine.background_writer import BackgroundWriter

A, B = ModelId("a"), ModelId("b")


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(lambda: None, LoopActivity())
    yield writer
    writer.close()


class Recorder:
    """Records jobs and callbacks. The first job runs until `release` is set."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self.writer, self.release = writer, threading.Event()
        self.jobs: list[str] = []
        self.callbacks: list[str] = []

    def submit(self, name: str, model_id: ModelId | None) -> None:
        def job() -> None:
            self.release.wait(10)
            self.jobs.append(name)

        self.writer.submit(job, lambda _: self.callbacks.append(name), model_id=model_id)


def test_waiting_for_a_model_does_not_wait_for_others_jobs(writer: BackgroundWriter) -> None:
    recorder = Recorder(writer)
    for name, model_id in (("a1", A), ("a2", A), ("none", None), ("b1", B), ("a3", A), ("b2", B)):
        recorder.submit(name, model_id)
    threading.Timer(0.05, recorder.release.set).start()
    writer.wait_for(B)
    assert recorder.callbacks == ["a1", "b1", "b2"]
    writer.drain()
    assert recorder.jobs == recorder.callbacks == ["a1", "b1", "b2", "a2", "none", "a3"]


def test_waiting_for_a_model_without_jobs_returns_at_once(writer: BackgroundWriter) -> None:
    recorder = Recorder(writer)
    recorder.submit("a", A)
    writer.wait_for(B)
    assert not recorder.callbacks
    recorder.release.set()


def test_error_of_a_job_reaches_its_callback(writer: BackgroundWriter) -> None:
    def fail() -> None:
        raise OSError("disk")

    errors: list[BaseException | None] = []
    writer.submit(fail, lambda done: errors.append(done.exception()))
    writer.drain()
    assert [str(error) for error in errors] == ["disk"]
