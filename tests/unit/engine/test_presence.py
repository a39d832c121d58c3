"""Whose silence counts: that of clients while the API was there to hear them, and nobody's while it was away."""

import time
from types import SimpleNamespace

import pytest

from skyrl_tx.engine import presence
from skyrl_tx.engine.presence import Presence
from skyrl_tx.testing.engine_house import House, forward_backward, optim_step, sample

DAY_S = 86_400.0


class Scene:
    """A clock, and an API that is there or not."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        self.is_there = True
        monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.presence = Presence(SimpleNamespace(peer_lives=lambda: self.is_there))

    def after(self, seconds: float) -> tuple[float, float]:
        self.now += seconds
        return self.presence.seconds(), self.presence.unbroken_s()


def test_time_goes_on_while_the_api_is_there_and_a_gap_begins_it_anew(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.after(20.0) == (20.0, 20.0)
    scene.is_there = False
    assert scene.after(5.0) == (20.0, 0.0)
    scene.is_there = True
    assert scene.after(3.0) == (23.0, 3.0)


def test_an_engine_that_did_not_look_for_long_does_not_know_that_the_api_was_there(monkeypatch) -> None:
    assert Scene(monkeypatch).after(1800.0) == (1800.0, 60.0)


@pytest.mark.parametrize("away_s", [1860.0, 8 * DAY_S])
def test_an_outage_is_not_the_silence_of_a_client(tmp_path, monkeypatch, away_s: float) -> None:
    house = House(tmp_path, housekeeping_interval_s=0.001)
    model_id, _ = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.answer(optim_step(), model_id=model_id, seq_id=2)
    before = house.answer(forward_backward(9, backward=False), model_id=model_id)
    waiting = house.submit(sample(max_tokens=200, eos_stops=False))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + away_s)
    house.run(waiting)
    assert len(house.result(waiting).sequences[0].tokens) == 200
    after = house.answer(forward_backward(9, backward=False), model_id=model_id)
    assert after.logprobs[0].tobytes() == before.logprobs[0].tobytes()
    house.close()
