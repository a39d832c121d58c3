"""A scheduler on fake programs with few pages, stepped under watch."""

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.batches import SampleRequest
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import Results, begin, make_prompt, make_request

LONGEST = 128
FEW_PAGES = JaxConfig(sample_slots=8, decode_slice_tokens=4, prefill_tokens=64, prefill_chunk_tokens=32)
FEW = SampleMemory(num_slots=8, tokens=8 * 32, prefix_tokens=64, max_length=LONGEST, page=8)
"""48 pages: room for eight samples of 48 tokens, or for three of the longest."""


class Watch:
    """Steps a scheduler and records when each sample ends and which samples were preempted."""

    def __init__(self, memory: SampleMemory = FEW, **changed: int) -> None:
        self.programs = FakeModelRunner()
        self.scheduler = SampleScheduler(self.programs, FEW_PAGES.model_copy(update=changed), memory, ())
        self.results = Results()
        self.num_steps = 0
        self.ended_at: dict[tuple[str, int], int] = {}
        self.preempted: list[tuple[str, int]] = []
        """The samples that got no token in the last step, though they had some and have not ended."""

    def begin(self, *requests: SampleRequest) -> None:
        begin(self.scheduler, *requests)

    def step(self) -> bool:
        deltas = self.scheduler.step()
        self.num_steps += 1
        progressed = {(delta.request_id, delta.index) for delta in deltas if delta.tokens.size}
        running = set(self.results.parts) - self.results.ended
        self.preempted = sorted(running - progressed)
        self.results.add(deltas)
        for key in self.results.ended - self.ended_at.keys():
            self.ended_at[key] = self.num_steps
        return bool(deltas)

    def run(self, *requests: SampleRequest) -> "Watch":
        """Run requests to their end, after which all pages are free."""
        self.begin(*requests)
        while self.step():
            pass
        assert self.scheduler.meters().kv_cache_tokens_used == 0
        return self

    def steps_until(self, *keys: tuple[str, int]) -> int:
        """Step until these samples have ended and return the number of steps."""
        started = self.num_steps
        while not self.ended_at.keys() >= set(keys):
            assert self.step()
        return self.num_steps - started


def short(name: str, max_tokens: int, *, size: int = 5, samples: int = 1) -> SampleRequest:
    return make_request(name, make_prompt(size, seed=size), max_tokens=max_tokens, samples=samples)
