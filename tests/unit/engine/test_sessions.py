"""Housekeeping for silent and finished sessions."""

import logging
import time

import numpy as np
import pytest
from sqlmodel import select

from skyrl_tx.apps.teams import usage
from skyrl_tx.contract.ids import CheckpointPath, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.store import checkpoints, models, recorded_logprobs, sampling_sessions, sessions
from skyrl_tx.store.tables import StabilityRow
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample


@pytest.fixture
def quick_harness(tmp_path):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001, session_timeout_s=3600.0)
    yield harness
    harness.close()


class CountingBackend(FakeBackend):
    """Counts deleted models."""

    num_deleted = 0

    def delete_model(self, model_id):
        self.num_deleted += model_id in self._models
        super().delete_model(model_id)


def test_models_of_a_finished_session_are_evicted_and_restored(quick_harness):
    harness = quick_harness
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.answer(forward_backward(backward=False), model_id=model_id)
    harness.api.write(lambda tx: sessions.finish(tx, harness.session_id, "done", time.time()))
    backend = CountingBackend("tiny", harness.config)
    first = harness.submit(forward_backward(3), model_id=model_id, seq_id=3)
    harness.run(first, harness.submit(sample(max_tokens=200, eos_stops=False)), backend=backend)
    assert backend.num_deleted == 1
    step = harness.answer(optim_step(), model_id=model_id, seq_id=4)
    assert step.metrics["unclipped_grad_l2:mean"] > 0


def test_models_of_an_open_session_stay_resident(quick_harness):
    harness = quick_harness
    model_id, _ = harness.create()
    backend = CountingBackend("tiny", harness.config)
    last = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.run(last, harness.submit(sample(max_tokens=200, eos_stops=False)), backend=backend)
    assert backend.num_deleted == 0


def test_unused_ephemeral_samplers_are_removed(tmp_path):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001, sampler_retention_s=0.001)
    model_id, _ = harness.create()
    saves = []
    for n in range(6):
        save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=SamplingSessionId(f"s:sample:{n}"))
        saves.append(harness.submit(save, model_id=model_id, seq_id=n + 1))
    harness.run(*saves)
    harness.run(harness.submit(sample(max_tokens=200, eos_stops=False)))
    rows = [
        harness.api.read(lambda tx, n=n: sampling_sessions.get(tx, SamplingSessionId(f"s:sample:{n}")))
        for n in range(6)
    ]
    assert [row.sampler_id is not None for row in rows] == [False] * 2 + [True] * 4
    harness.close()


@pytest.mark.usefixtures("api_is_there_for_long")
@pytest.mark.parametrize("how", ["deleted", "finished", "silent", "neither"])
def test_sampler_is_evicted_with_its_last_reference_or_client(quick_harness, how, caplog):
    harness = quick_harness
    caplog.set_level(logging.INFO)
    model_id, _ = harness.create()
    save = SaveWeights(kind="sampler_weights", name="s")
    owner, saved = harness.session_id, harness.submit(save, model_id=model_id, seq_id=1)
    harness.session_id = harness.new_session()
    other = harness.submit(sample(max_tokens=480, eos_stops=False))

    class ClosingBackend(FakeBackend):
        """Closes the client's session in the fifth slice and records evicted samplers."""

        num_slices, dropped = 0, ()

        def drop_sampler(self, sampler):
            self.dropped += (sampler,) if sampler in self._samplers else ()
            super().drop_sampler(sampler)

        def step_sample(self):
            self.num_slices += 1
            if self.num_slices == 5:
                harness.api.write(end)
            return super().step_sample()

    def end(tx):
        match how:
            case "deleted":
                assert checkpoints.delete(tx, CheckpointPath.parse(harness.result(saved).path))
            case "finished":
                sessions.finish(tx, owner, "done", time.time())
            case "silent":
                sessions.get(tx, owner).last_heartbeat_at = time.time() - 3601

    harness.run(saved)
    path = CheckpointPath.parse(harness.result(saved).path)
    sampler = SamplerId(harness.api.read(lambda tx: checkpoints.get(tx, path, time.time())).artifact_id)
    session_id, harness.session_id = harness.session_id, owner
    used = harness.submit(sample(sampler=sampler))
    harness.session_id = session_id
    backend = ClosingBackend("tiny", harness.config)
    harness.run(used, other, backend=backend)
    assert backend.dropped == (() if how == "neither" else (sampler,))
    assert caplog.messages.count("evicted samplers that no open session uses: 1") == len(backend.dropped)
    assert len(harness.result(used).sequences[0].tokens) == 8


def test_deleted_run_is_discarded_after_the_time_to_undo(tmp_path):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001, deletion_undo_s=3600.0)
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    saved = harness.submit(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=2)
    harness.run(saved)

    def last(seq_id):
        harness.run(
            harness.submit(forward_backward(), model_id=model_id, seq_id=seq_id),
            harness.submit(sample(max_tokens=200, eos_stops=False)),
        )

    harness.api.write(lambda tx: models.mark_deleted(tx, model_id, time.time() - 3500))
    last(3)
    assert harness.api.write(lambda tx: models.undelete(tx, model_id)), "it was kept"
    path = CheckpointPath.parse(harness.result(saved).path)
    assert harness.api.read(lambda tx: checkpoints.get(tx, path, time.time())) is not None
    harness.api.write(lambda tx: models.mark_deleted(tx, model_id, time.time() - 3700))
    harness.run(harness.submit(sample(max_tokens=200, eos_stops=False)))
    assert harness.api.read(lambda tx: models.get(tx, model_id)) is None
    assert harness.api.read(checkpoints.find_referenced_artifacts) == set()
    harness.close()


def test_requests_of_a_deleted_run_are_told_so(quick_harness):
    harness = quick_harness
    model_id, created = harness.create()
    harness.run(created)
    waiting = harness.submit(forward_backward(), model_id=model_id, seq_id=1)

    def delete(tx):  # as `purge` leaves a run that still has open requests
        models.mark_deleted(tx, model_id, time.time())
        models.set_status(tx, model_id, "expired")

    harness.api.write(delete)
    harness.run(waiting)
    assert harness.result(waiting).message == f"model_id '{model_id}' was deleted"


def test_recorded_logprobs_expire_a_day_after_their_last_use(quick_harness):
    harness = quick_harness
    drawn = {name: np.array([-1.0], np.float32) for name in ("old", "new")}

    def record(tx):
        recorded_logprobs.record(tx, harness.session_id, 1, drawn, time.time())
        recorded_logprobs.touch(tx, ["old"], time.time() - recorded_logprobs.RETENTION_S - 1)

    harness.api.write(record)
    harness.answer(sample(max_tokens=2))
    kept = harness.api.read(lambda tx: tx.exec(select(StabilityRow.sequence_id)).all())
    assert kept == ["new"]


@pytest.mark.usefixtures("api_is_there_for_long")
@pytest.mark.parametrize("how", ["finished", "silent"])
def test_samples_of_a_closed_session_fail_and_free_their_slots(tmp_path, how):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001, session_timeout_s=3600.0)
    harness.config = harness.config.model_copy(update={"max_sample_tokens": 1600})
    endless = sample(max_tokens=1590, eos_stops=False)
    neighbour = harness.submit(sample(max_tokens=1500, eos_stops=False))
    harness.session_id = gone = harness.new_session()
    running, waiting = harness.submit(endless), harness.submit(endless)
    if how == "finished":
        harness.api.write(lambda tx: sessions.finish(tx, gone, "errored", time.time()))
    else:
        harness.api.write(lambda tx: setattr(sessions.get(tx, gone), "last_heartbeat_at", time.time() - 3601))

    class CountingBackend(FakeBackend):
        started = ()

        def begin_sample(self, batch):
            self.started += tuple(request.request_id for request in batch.requests)
            super().begin_sample(batch)

    backend = CountingBackend("tiny", harness.config)
    harness.run(neighbour, running, waiting, backend=backend)
    for request_id in (running, waiting):
        failure = harness.result(request_id)
        assert failure.category == "user" and ("errored" if how == "finished" else "3600 s") in failure.message
    assert running in backend.started and waiting not in backend.started and not backend._open
    assert len(harness.result(neighbour).sequences[0].tokens) == 1500

    counted = harness.api.read(lambda tx: usage.read_totals(tx, None, 0.0, session_ids=[gone]))
    assert {total.kind for total in counted} == {"prefill", "sampled"}
    harness.close()
