"""What silent and finished sessions lose, and what is swept away."""

import time

import numpy as np
import pytest
from sqlmodel import select

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract.ids import CheckpointPath, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.store import checkpoints, samplers, sessions, stability
from skyrl_tx.store.tables import StabilityRow
from skyrl_tx.testing.engine_house import House, forward_backward, optim_step, sample


@pytest.fixture
def quick_house(tmp_path):
    house = House(tmp_path, housekeeping_interval_s=0.001, session_timeout_s=3600.0)
    yield house
    house.close()


class Counting(FakeBackend):
    """Counts how many models it was told to delete."""

    num_deleted = 0

    def delete_model(self, model_id):
        self.num_deleted += model_id in self._models
        super().delete_model(model_id)


def test_a_finished_sessions_models_leave_the_device_and_come_back(quick_house):
    house = quick_house
    model_id, _ = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.submit(optim_step(), model_id=model_id, seq_id=2)
    house.answer(forward_backward(backward=False), model_id=model_id)
    house.api.write(lambda tx: sessions.finish(tx, house.session_id, "done", time.time()))
    backend = Counting("tiny", house.config)
    first = house.submit(forward_backward(3), model_id=model_id, seq_id=3)
    house.run(first, house.submit(sample(max_tokens=200, eos_stops=False)), backend=backend)
    assert backend.num_deleted == 1
    step = house.answer(optim_step(), model_id=model_id, seq_id=4)
    assert step.metrics["unclipped_grad_l2:mean"] > 0


def test_models_of_a_living_session_stay(quick_house):
    house = quick_house
    model_id, _ = house.create()
    backend = Counting("tiny", house.config)
    last = house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.run(last, house.submit(sample(max_tokens=200, eos_stops=False)), backend=backend)
    assert backend.num_deleted == 0


def test_unused_unnamed_samplers_are_let_go(tmp_path):
    house = House(tmp_path, housekeeping_interval_s=0.001, sampler_retention_s=0.001)
    model_id, _ = house.create()
    saves = []
    for n in range(6):
        save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=SamplingSessionId(f"s:sample:{n}"))
        saves.append(house.submit(save, model_id=model_id, seq_id=n + 1))
    house.run(*saves)
    house.run(house.submit(sample(max_tokens=200, eos_stops=False)))
    rows = [house.api.read(lambda tx, n=n: samplers.get(tx, SamplingSessionId(f"s:sample:{n}"))) for n in range(6)]
    assert [row.sampler_id is not None for row in rows] == [False] * 2 + [True] * 4
    house.close()


@pytest.mark.usefixtures("api_is_there_for_long")
@pytest.mark.parametrize("how", ["deleted", "finished", "silent", "neither"])
def test_a_sampler_leaves_the_device_with_its_snapshot_or_its_clients(quick_house, how):
    house = quick_house
    model_id, _ = house.create()
    save = SaveWeights(kind="sampler_weights", name="s")
    owner, saved = house.session_id, house.submit(save, model_id=model_id, seq_id=1)
    house.session_id = house.new_session()
    other = house.submit(sample(max_tokens=1600, eos_stops=False))

    class Ending(FakeBackend):
        """Loses the client's interest in its fifth slice; remembers what was dropped."""

        num_slices, dropped = 0, ()

        def drop_sampler(self, sampler):
            self.dropped += (sampler,) if sampler in self._samplers else ()
            super().drop_sampler(sampler)

        def step_sample(self):
            self.num_slices += 1
            if self.num_slices == 5:
                house.api.write(end)
            return super().step_sample()

    def end(tx):
        match how:
            case "deleted":
                assert checkpoints.delete(tx, CheckpointPath.parse(house.result(saved).path))
            case "finished":
                sessions.finish(tx, owner, "done", time.time())
            case "silent":
                sessions.get(tx, owner).last_heartbeat_at = time.time() - 3601

    house.run(saved)
    path = CheckpointPath.parse(house.result(saved).path)
    sampler = SamplerId(house.api.read(lambda tx: checkpoints.get(tx, path, time.time())).artifact_id)
    session_id, house.session_id = house.session_id, owner
    used = house.submit(sample(sampler=sampler))
    house.session_id = session_id
    backend = Ending("tiny", house.config)
    house.run(used, other, backend=backend)
    assert backend.dropped == (() if how == "neither" else (sampler,))
    assert len(house.result(used).sequences[0].tokens) == 8


def test_records_of_samples_are_forgotten_a_day_after_their_last_use(quick_house):
    house = quick_house
    drawn = {name: np.array([-1.0], np.float32) for name in ("old", "new")}

    def record(tx):
        stability.record(tx, house.session_id, 1, drawn, time.time())
        stability.touch(tx, ["old"], time.time() - stability.KEPT_UNUSED_S - 1)

    house.api.write(record)
    house.answer(sample(max_tokens=2))
    kept = house.api.read(lambda tx: tx.exec(select(StabilityRow.sequence_id)).all())
    assert kept == ["new"]


@pytest.mark.usefixtures("api_is_there_for_long")
@pytest.mark.parametrize("how", ["finished", "silent"])
def test_samples_of_a_session_that_ended_make_room_for_others(tmp_path, how):
    house = House(tmp_path, housekeeping_interval_s=0.001, session_timeout_s=3600.0)
    house.config = house.config.model_copy(update={"max_sample_tokens": 1600})
    endless = sample(max_tokens=1590, eos_stops=False)
    neighbour = house.submit(sample(max_tokens=1500, eos_stops=False))
    house.session_id = gone = house.new_session()
    running, waiting = house.submit(endless), house.submit(endless)
    if how == "finished":
        house.api.write(lambda tx: sessions.finish(tx, gone, "errored", time.time()))
    else:
        house.api.write(lambda tx: setattr(sessions.get(tx, gone), "last_heartbeat_at", time.time() - 3601))

    class Counting(FakeBackend):
        begun = ()

        def begin_sample(self, batch):
            self.begun += tuple(request.request_id for request in batch.requests)
            super().begin_sample(batch)

    backend = Counting("tiny", house.config)
    house.run(neighbour, running, waiting, backend=backend)
    for request_id in (running, waiting):
        failure = house.result(request_id)
        assert failure.category == "user" and ("errored" if how == "finished" else "3600 s") in failure.message
    assert waiting not in backend.begun and not backend._running
    assert len(house.result(neighbour).sequences[0].tokens) == 1500
    house.close()
