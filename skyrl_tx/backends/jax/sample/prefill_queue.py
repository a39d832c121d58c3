"""The prompts that wait to be computed, and the one that is partly computed."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from skyrl_tx.backends.jax.sample.prefill import Prefill
from skyrl_tx.backends.jax.sample.running import RunningSample, SampleKey
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId


@dataclass(slots=True)
class PrefillQueue:
    """Preempted samples, then new requests, each in order of arrival; at most one prompt is partly computed."""

    preempted: dict[SampleKey, Prefill] = field(default_factory=dict[SampleKey, Prefill])
    new: dict[RequestId, Prefill] = field(default_factory=dict[RequestId, Prefill])
    current: Prefill | None = None
    """The prompt that is partly computed."""

    def waiting(self) -> Iterator[Prefill]:
        """Yield the prompts of which nothing is computed, in order."""
        yield from self.preempted.values()
        yield from self.new.values()

    def add(self, request: SampleRequest) -> None:
        """Append a request. A later part of a waiting request joins the earlier part, so that both share a prompt."""
        before = self.new.get(request.request_id)
        self.new[request.request_id] = Prefill(request=request if before is None else _joined(before.request, request))

    def preempt(self, sample: RunningSample) -> None:
        """Append a preempted sample."""
        sample.preempt()
        self.preempted[sample.key] = Prefill.of_preempted(sample)

    def put_back(self) -> Prefill:
        """Let the prompt that is partly computed wait again, before all others, and return what was computed."""
        current = self.take_current()
        again, request = current.again(), current.request
        if again.preempted is not None:
            self.preempted = {(request.request_id, request.first_index): again, **self.preempted}
        else:
            later = self.new.pop(request.request_id, None)
            if later is not None:
                again.request = _joined(request, later.request)
            self.new = {request.request_id: again, **self.new}
        return current

    def put_first(self, waiting: Prefill) -> None:
        """Let the later samples of a request wait before all others."""
        self.new = {waiting.request.request_id: waiting, **self.new}

    def remove(self, waiting: Prefill) -> None:
        """Remove a waiting prompt."""
        if waiting.preempted is None:
            del self.new[waiting.request.request_id]
        else:
            del self.preempted[waiting.request.request_id, waiting.request.first_index]

    def take_current(self) -> Prefill:
        """Remove and return the prompt that is partly computed."""
        assert self.current is not None
        current, self.current = self.current, None
        return current

    def cancel(self, request_id: RequestId) -> list[Prefill]:
        """Remove a request with all its samples, and return what was partly computed. It may be unknown."""
        self.new.pop(request_id, None)
        for key in [key for key in self.preempted if key[0] == request_id]:
            del self.preempted[key]
        is_current = self.current is not None and self.current.request.request_id == request_id
        return [self.take_current()] if is_current else []

    def cancel_sample(self, request_id: RequestId, index: int) -> list[Prefill]:
        """Remove a preempted sample, and return what was partly computed. It may be unknown."""
        self.preempted.pop((request_id, index), None)
        sample = None if self.current is None else self.current.preempted
        is_current = sample is not None and (sample.request.request_id, sample.index) == (request_id, index)
        return [self.take_current()] if is_current else []


def _joined(earlier: SampleRequest, later: SampleRequest) -> SampleRequest:
    """Return two neighbouring parts of a request as one."""
    assert later.first_index == earlier.first_index + earlier.num_samples
    return replace(earlier, num_samples=earlier.num_samples + later.num_samples)
