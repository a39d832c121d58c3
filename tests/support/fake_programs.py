"""Sampling programs in numpy: the scheduler's device for tests that need no compiler.

Keys are 64-bit hashes. The key of a position depends on its token, its adapter and the shape of the chunk in which it
was computed; positions that nothing has written are UNWRITTEN, and reading one fails. A token is a hash of all tokens
before it, the adapter and the sample's seed and index. A log-probability is a hash of the keys as well, so that it also
depends on how they were computed, as rounding does on a device. The state of a prompt is a hash of its keys so far: a
chunk that follows another state than that of the keys before it fails.
"""

import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.sample.draw import Drawn
from skyrl_tx.backends.jax.sample.running import BASE, PromptKV, RunningSample
from skyrl_tx.backends.jax.shapes import KVLayout
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.contract.results import PromptResult

UNWRITTEN = -1
NO_STATE = 0
TOPK = 3
VOCAB_SIZE = 256

KEY = np.dtype([("token", np.int64), ("adapter", np.int64), ("start", np.int64), ("padded", np.int64)])
"""A key: its token, its adapter's weights, and the chunk that computed it. A decode step is a chunk of one token."""


@dataclass(eq=False, weakref_slot=True, slots=True)
class FakeState:
    """The state of fixed size after some keys: their hash."""

    value: int


@dataclass
class FakeBuffer:
    """The keys of a prompt, and its state."""

    keys: np.ndarray
    state: FakeState


@dataclass(frozen=True)
class FakeScores:
    """Scores of a prompt: the log-probability of each token is its own number over 1000."""

    request: SampleRequest

    def result(self) -> PromptResult:
        return PromptResult(logprobs=(self.request.prompt / -1000).astype(np.float32))


class FakePrograms:
    """The methods of `JaxPrograms`. Counts prefill and tracks the live prompt buffers."""

    def __init__(self, max_samplers: int = 2, *, state_tokens: int = 0) -> None:
        self.layouts: list[KVLayout] = []
        """Every layout of the KV cache, the present one last."""
        self.extended: list[tuple[int, int]] = []
        """The start and the padded size of every prefill chunk."""
        self.decoded: list[int] = []
        """The number of steps of every decode slice."""
        self.prompt_tokens_peak = 0
        """The most positions that prompt buffers had at the same time, their states and the kept ones included."""
        self.fail_extend = False
        self._prompts: weakref.WeakSet[PromptKV] = weakref.WeakSet()
        self._slots: dict[SamplerId, int] = {}
        self._weights = {BASE: 0}
        self._max_samplers = max_samplers
        self._state_tokens = state_tokens
        self._states: weakref.WeakSet[FakeState] = weakref.WeakSet()
        self.pool = self
        self._cache = np.zeros((0, 0), KEY)

    @property
    def num_computed(self) -> int:
        """The tokens of all prefill chunks, padding included."""
        return sum(padded for _, padded in self.extended)

    def load(self, sampler: SamplerId, adapter: Any) -> None:
        """Load an adapter, which is any positive integer."""
        if sampler in self._slots:
            return
        if len(self._slots) == self._max_samplers:
            raise CapacityError("all adapter slots for sampling are in use")
        slot = min(set(range(1, self._max_samplers + 1)) - set(self._slots.values()))
        self._slots[sampler], self._weights[slot] = slot, int(adapter)

    def drop(self, sampler: SamplerId) -> None:
        self._slots.pop(sampler, None)

    def slot_of(self, sampler: SamplerId | None) -> int:
        return BASE if sampler is None else self._slots[sampler]

    def allocate_prompt(self, length: int) -> PromptKV:
        return self._track(PromptKV(FakeBuffer(_unwritten(length), FakeState(NO_STATE)), length))

    def copy_prompt(self, prompt: PromptKV, length: int, state: FakeState | None = None) -> PromptKV:
        copied = _unwritten(length)
        size = min(length, prompt.length)
        copied[:size] = prompt.data.keys[:size]
        own = prompt.data.state if state is None else state
        return self._track(PromptKV(FakeBuffer(copied, FakeState(own.value)), length))

    def copy_state(self, prompt: PromptKV) -> FakeState:
        state = FakeState(prompt.data.state.value)
        self._states.add(state)
        self._measure()
        return state

    def _track(self, prompt: PromptKV) -> PromptKV:
        self._prompts.add(prompt)
        self._measure()
        return prompt

    def _measure(self) -> None:
        states = self._state_tokens * (len(self._prompts) + len(self._states))
        self.prompt_tokens_peak = max(self.prompt_tokens_peak, sum(each.length for each in self._prompts) + states)

    def scores(self, request: SampleRequest) -> FakeScores:
        return FakeScores(request)

    def extend(
        self, prompt: PromptKV, tokens: Int32Array, start: int, *, padded: int, adapter: int, scores: FakeScores | None
    ) -> Any:
        assert 0 < tokens.size <= padded and start + padded <= prompt.length, "the padded chunk must fit"
        buffer = prompt.data
        assert (buffer.keys["token"][:start] != UNWRITTEN).all(), "a chunk follows written keys"
        if self._state_tokens and start:
            assert buffer.state.value == _state(buffer.keys[:start]), "a chunk follows the state of the keys before it"
        if self.fail_extend and start:
            raise RuntimeError("prefill failed")
        self.extended.append((start, padded))
        chunk = buffer.keys[start : start + tokens.size]
        chunk["token"], chunk["adapter"] = tokens, self._weights[adapter]
        chunk["start"], chunk["padded"] = start, padded
        buffer.state.value = _state(buffer.keys[: start + tokens.size])
        return buffer.keys[: start + tokens.size].copy()

    def draw_first(self, last_hidden: Any, samples: Sequence[RunningSample]) -> Drawn:
        assert samples
        drawn = _empty_batch(1, len(samples))
        for row, sample in enumerate(samples):
            assert last_hidden["token"].tolist() == sample.request.prompt.tolist()
            _draw(drawn, 0, row, last_hidden, self._weights[sample.adapter], sample)
        return drawn

    def allocate_cache(self, layout: KVLayout) -> None:
        self.layouts.append(layout)
        self._cache = np.stack([_unwritten(layout.length)] * layout.num_slots)

    def insert(self, prompt: PromptKV, num_tokens: int, slots: Sequence[int]) -> None:
        keys = prompt.data.keys[:num_tokens]
        assert (keys["token"] != UNWRITTEN).all()
        assert not self._state_tokens or prompt.data.state.value == _state(keys), "the state is that after the prompt"
        for slot in slots:
            self._cache[slot] = _unwritten(self._cache.shape[1])
            self._cache[slot, :num_tokens] = keys

    def read_slot(self, slot: int, num_positions: int) -> Any:
        return self._cache[slot, :num_positions].copy()

    def write_slot(self, saved: Any, slot: int) -> None:
        self._cache[slot, : saved.size] = saved

    def decode(self, samples: Mapping[int, RunningSample], adapters: Sequence[int], num_steps: int) -> Drawn:
        self.decoded.append(num_steps)
        num_slots, length = self._cache.shape
        drawn = _empty_batch(num_steps, num_slots)
        for slot, sample in samples.items():
            adapter = adapters[slot * len(adapters) // num_slots]
            assert adapter == sample.adapter, "the slot's adapter is the sample's"
            token, weights = sample.last_token, self._weights[adapter]
            for n in range(num_steps):
                position = sample.position + n
                if position >= length:  # only steps after the sample's end, which count for nothing
                    assert n >= sample.num_steps_left
                    break
                self._cache[slot, position] = (token, weights, position, 1)
                keys = self._cache[slot, : position + 1]
                assert (keys["token"] != UNWRITTEN).all(), "decoding reads written keys only"
                token = _draw(drawn, n, slot, keys, weights, sample)
        return drawn

    def compile_all(self, sampler: SamplerId) -> None:
        """Do nothing: there is no compiler."""


def _unwritten(length: int) -> np.ndarray:
    return np.full(length, UNWRITTEN, np.int64).astype(KEY)


def _state(keys: np.ndarray) -> int:
    return _hash(keys.tobytes())


def _empty_batch(num_steps: int, num_rows: int) -> Drawn:
    shape, topk = (num_steps, num_rows), (num_steps, num_rows, TOPK)
    return Drawn(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(topk, np.int32), np.zeros(topk, np.float32)
    )


def _draw(drawn: Drawn, n: int, row: int, keys: np.ndarray, weights: int, sample: RunningSample) -> int:
    """Draw the token after `keys` into a cell of the batch and return it."""
    params = sample.request.params
    identity = (0, 0) if params.temperature == 0 else (params.seed, sample.index)
    token = 2 + _hash(keys["token"].tobytes(), keys["adapter"].tobytes(), (weights, *identity)) % (VOCAB_SIZE - 2)
    drawn.tokens[n, row] = token
    drawn.logprobs[n, row] = -(_hash(keys.tobytes(), (token,)) % 10_000) / 1000
    drawn.topk_tokens[n, row] = token + np.arange(TOPK)
    drawn.topk_logprobs[n, row] = drawn.logprobs[n, row] - np.arange(TOPK)
    return int(token)


def _hash(*parts: Any) -> int:
    """Return a hash that is equal in all processes, unlike that of strings and bytes."""
    value = 0
    for part in parts:
        value = zlib.crc32(part if isinstance(part, bytes) else repr(part).encode(), value)
    return value
