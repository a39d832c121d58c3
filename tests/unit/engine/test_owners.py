"""Owners share the device equally, whatever number of sessions each has, and cached prompts stay with their owner."""

from collections import Counter

import pytest

from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, sample

ANN, BOB = 65, 66
"""The first token of each owner's prompts."""


class Recorded(FakeBackend):
    """Records the requests, and before each slice the number of open samples of each owner."""

    def __init__(self, config):
        super().__init__("tiny", config)
        self.requests, self.slices = {}, []

    def begin_sample(self, batch):
        self.requests |= {request.request_id: request for request in batch.requests}
        super().begin_sample(batch)

    def step_sample(self):
        num_open = Counter()
        for request_id, samples in self._running.items():
            num_open[int(self.requests[request_id].prompt[0])] += len(samples)
        self.slices.append(num_open)
        return super().step_sample()


@pytest.fixture
def make_harness(tmp_path):
    harnesses = []

    def make(config=None, **settings):
        harness = EngineHarness(tmp_path, **settings)
        harness.config = harness.config.model_copy(update=config or {})
        harnesses.append(harness)
        return harness

    yield make
    for harness in harnesses:
        harness.close()


def ask(owner_token, **params):
    return sample((owner_token, 1), eos_stops=False, **params)


def test_one_session_beside_fifteen_of_another_owner_has_half_of_the_slots(make_harness):
    harness = make_harness({"sample_slots": 7})
    harness.become("ann")
    for _ in range(15):
        harness.session_id = harness.new_session()
        for _ in range(4):
            harness.submit(ask(ANN, max_tokens=160))
    harness.become("bob")
    of_bob = [harness.submit(ask(BOB, max_tokens=80)) for _ in range(16)]
    backend = Recorded(harness.config)
    harness.run(*of_bob, backend=backend)
    under_load = backend.slices[: max(n for n, num_open in enumerate(backend.slices) if num_open[BOB] == 4)]
    assert len(under_load) >= 15
    assert all(num_open == {ANN: 4, BOB: 4} for num_open in under_load), under_load


def test_owner_alone_has_all_slots_and_gives_them_back_as_samples_end(make_harness):
    harness = make_harness({"sample_slots": 7})
    harness.become("ann")
    of_ann = [harness.submit(ask(ANN, max_tokens=16 * n)) for n in range(1, 30)]
    arrived = []

    class Interrupted(Recorded):
        def step_sample(self):
            if len(self.slices) == 5:
                harness.become("bob")
                arrived.extend(harness.submit(ask(BOB, max_tokens=320)) for _ in range(8))
            return super().step_sample()

    backend = Interrupted(harness.config)
    harness.run(*of_ann, backend=backend)
    assert all(num_open == {ANN: 8} for num_open in backend.slices[:6])
    later = backend.slices[6:]
    shared = next(n for n, num_open in enumerate(later) if num_open[BOB] == 4)
    assert [num_open[ANN] for num_open in later[:shared]] == sorted([num_open[ANN] for num_open in later[:shared]])[
        ::-1
    ]
    assert later[shared] == {ANN: 4, BOB: 4}, "each slot that became free was bob's until then"


@pytest.mark.parametrize(("flag", "scopes"), [(False, ["ann", "bob"]), (True, ["", ""])])
def test_cached_prompts_are_used_for_their_owner_only_unless_shared(make_harness, flag, scopes):
    harness = make_harness(share_prefix_cache=flag)
    asked = []
    for owner in ("ann", "bob"):
        harness.become(owner)
        asked.append(harness.submit(ask(ANN)))
    backend = Recorded(harness.config)
    harness.run(*asked, backend=backend)
    assert [backend.requests[request_id].cache_scope for request_id in asked] == scopes
