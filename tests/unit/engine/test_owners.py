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
