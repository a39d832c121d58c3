"""Who waits for a prompt to be computed, and who for a slot: plain records, no device."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from skyrl_tx.backends.jax.prefill import Prefill
from skyrl_tx.backends.jax.slots import RunningSample, num_cached
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.layers.kv_cache import KeyValues


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is to be computed for a request: its prompt, or all that a sample had in the cache before it made room."""

    request: SampleRequest
    resumed: RunningSample | None = None

    @property
    def size(self) -> int:
        """How many tokens that are."""
        return self.request.prompt.size if self.resumed is None else self.resumed.position

    @property
    def num_samples(self) -> int:
        """How many slots it is for."""
        return self.request.num_samples if self.resumed is None else 1

    def reach(self, slice_tokens: int) -> int:
        """Return how many positions of the cache its samples will have after their first slice."""
        if self.resumed is not None:
            return self.resumed.reach(slice_tokens)
        return min(self.request.prompt.size + slice_tokens, num_cached(self.request))


@dataclass(slots=True)
class Lane:
    """Samples that made room, then requests in order of arrival; the prompt of at most one is computed in part."""

    aside: dict[tuple[RequestId, int], Waiting] = field(default_factory=dict[tuple[RequestId, int], Waiting])
    new: dict[RequestId, Waiting] = field(default_factory=dict[RequestId, Waiting])
    current: Prefill | None = None

    def waiting(self) -> Iterator[Waiting]:
        """All but the current one, in order."""
        yield from self.aside.values()
        yield from self.new.values()

    def add(self, request: SampleRequest) -> None:
        """Have a request wait, or a part of one: with an earlier part that does, so that both share a prompt."""
        before = self.new.get(request.request_id)
        if before is not None:
            earlier = before.request
            assert request.first_index == earlier.first_index + earlier.num_samples
            request = replace(earlier, num_samples=earlier.num_samples + request.num_samples)
        self.new[request.request_id] = Waiting(request)

    def take(self, waiting: Waiting) -> None:
        """Have one wait no more."""
        if waiting.resumed is None:
            del self.new[waiting.request.request_id]
        else:
            del self.aside[waiting.request.request_id, waiting.resumed.index]

    def forget(self, request_id: RequestId) -> None:
        """Forget a request and its samples. Of no effect when it is not here."""
        self.new.pop(request_id, None)
        for key in [key for key in self.aside if key[0] == request_id]:
            del self.aside[key]
        if self.current is not None and self.current.request.request_id == request_id:
            self.current = None

    def forget_sample(self, request_id: RequestId, index: int) -> None:
        """Forget one sample that made room. Of no effect when it is not here."""
        self.aside.pop((request_id, index), None)
        resumed = None if self.current is None else self.current.resumed
        if resumed is not None and (resumed.request.request_id, resumed.index) == (request_id, index):
            self.current = None


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """Keys and values [L, 1, K, C, H], and the samples that wait for a slot to go on from them."""

    request: SampleRequest
    keys: KeyValues
    samples: deque[RunningSample]
