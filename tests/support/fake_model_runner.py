"""Sampling programs in numpy, a fake device for scheduler tests that need no compiler.

The key of a position depends on its token, its adapter and the shape of the chunk in which it was
computed. Unused positions are UNWRITTEN. Reading an UNWRITTEN position fails, and so does writing to
a written position or to the empty page. A token is a hash of all tokens before it, the adapter and
the sample's seed and index. A log-probability is also a hash of the keys, so it depends on how they
were computed, like rounding on a device. The state of a prompt or sample is a hash of its keys so
far, and continuing from a state that does not match the keys fails.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.sample.draw import DrawnTokens
from skyrl_tx.backends.jax.sample.model_runner import PromptChunk
from skyrl_tx.backends.jax.sample.programs import ENDED
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, MAX_STOPS, BlockTableRow, RunningSample, SampleKey
from skyrl_tx.backends.jax.sample.slice_rows import RowTokens
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.contract.results import PromptResult, TopK

UNWRITTEN = -1
TOPK = 3
VOCAB_SIZE = 256

KEY = np.dtype([("token", np.int64), ("adapter", np.int64), ("start", np.int64), ("padded", np.int64)])
"""A key: its token, its adapter's weights, and the chunk that computed it. A decode step is a chunk of one token."""


@dataclass(frozen=True)
class FakeScores:
    """Scores of a prompt, by chunk. A log-probability is a hash of the keys of the token and those before it."""

    request: SampleRequest
    chunks: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    def reuse(self, chunks: Mapping[int, np.ndarray], num_tokens: int) -> None:
        self.chunks.update({start: chunk for start, chunk in chunks.items() if start < num_tokens})

    def add(self, keys: np.ndarray, start: int) -> None:
        """Add the chunk from `start` to the end of `keys`."""
        assert sum(chunk.size for chunk in self.chunks.values()) == start, "every token before the chunk has its scores"
        numbers = [_hash(keys[:end].tobytes()) % 10_000 for end in range(start + 1, keys.size + 1)]
        self.chunks[start] = np.array(numbers, np.float32) / -1000

    def fetch(self) -> dict[int, np.ndarray]:
        return self.chunks

    def make_result(self) -> PromptResult:
        logprobs = np.concatenate([self.chunks[start] for start in sorted(self.chunks)])
        assert logprobs.size == self.request.prompt.size
        return PromptResult(logprobs=logprobs)


@dataclass(frozen=True)
class FakeSlice:
    """A slice, which is computed when it is dispatched."""

    drawn: Sequence[RowTokens]

    def read(self) -> Sequence[RowTokens]:
        return self.drawn


class FakeModelRunner:
    """The methods of `ModelRunner`. Counts prefill."""

    def __init__(
        self,
        max_samplers: int = 2,
        *,
        runs_ahead: bool = False,
        prefers_few_rows: bool = False,
        prompts_of_shard: int = 1,
    ) -> None:
        self.extended: list[tuple[int, int]] = []
        """The start and the padded size of every prefill chunk."""
        self.together: list[int] = []
        """How many chunks were computed at the same time."""
        self.decoded: list[int] = []
        """The number of steps of every decode slice."""
        self.copied: list[tuple[int, int]] = []
        """Every page that was copied or cleared: its source, and its target."""
        self.uncompiled: frozenset[int] = frozenset()
        """The numbers of adjusted samples whose program is being compiled."""
        self.fail_extend = False
        self.runs_ahead = runs_ahead
        self.prefers_few_rows = prefers_few_rows
        self.prompts_of_shard = prompts_of_shard
        self._last: dict[SampleKey, int] = {}
        self._slots: dict[SamplerId, int] = {}
        self._weights = {BASE_SLOT: 0}
        self._max_samplers = max_samplers
        self.pool = self
        self.vocab_size = VOCAB_SIZE

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

    def get_slot(self, sampler: SamplerId | None) -> int:
        return BASE_SLOT if sampler is None else self._slots[sampler]

    def allocate_cache(self, memory: SampleMemory) -> None:
        self._memory = memory
        own = memory.per_shard
        self._pages = np.full((memory.shards, own.num_pages, memory.page), UNWRITTEN, np.int64).astype(KEY)
        self._states = np.zeros((memory.shards, own.num_states), np.int64)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, pages: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]], shard: int = 0) -> None:
        for source, target in pages:
            self._pages[shard, target] = self._pages[shard, source]
        for source, target in states:
            self._states[shard, target] = self._states[shard, source]
        self.copied += pages

    def _keys(self, table: BlockTableRow, num_tokens: int) -> np.ndarray:
        """Return the first keys of a table. They must all be written and match the keys in its state."""
        keys = self._pages[table.shard, table.pages].reshape(-1)[:num_tokens]
        assert keys.size == num_tokens and (keys["token"] != UNWRITTEN).all(), "only written keys are read"
        if self._memory.state_tokens:
            seen = _hash(keys.tobytes()) if num_tokens else 0
            assert self._states[table.shard, table.state] == seen, "the state is that after the keys"
        return keys

    def _write(self, table: BlockTableRow, before: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Write keys after those before them. Return all of them."""
        for position, key in enumerate(keys, start=before.size):
            page, offset = table.pages[position // self._memory.page], position % self._memory.page
            assert page > 0 and self._pages[table.shard, page, offset]["token"] == UNWRITTEN, "it is written once"
            self._pages[table.shard, page, offset] = key
        after = np.concatenate([before, keys])
        if self._memory.state_tokens:
            assert table.state > 0
            self._states[table.shard, table.state] = _hash(after.tobytes())
        return after

    def precompile(self, requests: Sequence[SampleRequest]) -> None:
        """Nothing is compiled."""

    def is_compiled(self, samples: Sequence[RunningSample]) -> bool:
        assert samples
        return len(samples) not in self.uncompiled

    def make_scores(self, request: SampleRequest) -> FakeScores:
        return FakeScores(request)

    def prefill(self, chunks: Sequence[PromptChunk], padded: int) -> list[Any]:
        assert 0 < max(Counter(chunk.table.shard for chunk in chunks).values()) <= self.prompts_of_shard
        self.together.append(len(chunks))
        return [self._prefill(chunk, padded) for chunk in chunks]

    def _prefill(self, chunk: PromptChunk, padded: int) -> Any:
        assert 0 < chunk.tokens.size <= padded
        before = self._keys(chunk.table, chunk.start)
        if self.fail_extend and chunk.start:
            raise RuntimeError("prefill failed")
        self.extended.append((chunk.start, padded))
        keys = np.zeros(chunk.tokens.size, KEY)
        keys["token"], keys["adapter"] = chunk.tokens, self._weights[chunk.adapter]
        keys["start"], keys["padded"] = chunk.start, padded
        keys = self._write(chunk.table, before, keys)
        if chunk.scores is not None:
            chunk.scores.add(keys, chunk.start)
        return keys

    def draw_first(self, last_hidden: Any, samples: Sequence[RunningSample]) -> DrawnTokens:
        assert samples
        drawn = _empty_batch(1, len(samples))
        for row, sample in enumerate(samples):
            assert last_hidden["token"].tolist() == sample.request.prompt.tolist()
            _draw(drawn, 0, row, last_hidden, self._weights[sample.adapter], sample)
        return drawn

    def dispatch(self, samples: Sequence[RunningSample], num_steps: int) -> "FakeSlice":
        on_shard = Counter(sample.table.shard for sample in samples)
        assert max(on_shard.values()) <= self._memory.per_shard.num_slots

        self.decoded.append(num_steps)
        found: list[RowTokens] = []

        for sample in samples:
            is_read = sample.num_drawn > sample.position - sample.size
            assert self.runs_ahead or is_read
            token = sample.next_token if is_read else self._last[sample.key]
            weights, is_stopped = self._weights[sample.adapter], token == ENDED
            before = self._keys(sample.table, 0 if is_stopped else sample.position)
            drawn, again, num = _empty_batch(num_steps, 1), sample.get_replayed_tokens(), 0
            while num < min(num_steps, sample.end - sample.position) and not is_stopped:
                key = np.array([(token, weights, sample.position + num, 1)], KEY)
                before = self._write(sample.table, before, key)
                token = _draw(drawn, num, 0, before, weights, sample)
                assert num >= again.size or token == again[num]
                num += 1
                is_stopped = len(sample.stops) <= MAX_STOPS and token in sample.stops
            self._last[sample.key] = ENDED if is_stopped else token
            own, k = drawn.row(0, num), sample.request.options.sample_topk
            topk = TopK(token_ids=own.topk_tokens[:, :k], logprobs=own.topk_logprobs[:, :k]) if k else None
            found.append((sample, sample.position, own.tokens, own.logprobs, is_stopped, topk))

        return FakeSlice(found)

    def compile_all(self, sampler: SamplerId, *, usual_only: bool = False) -> None:
        """Do nothing: there is no compiler."""


def _empty_batch(num_steps: int, num_rows: int) -> DrawnTokens:
    shape, topk = (num_steps, num_rows), (num_steps, num_rows, TOPK)
    return DrawnTokens(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(topk, np.int32), np.zeros(topk, np.float32)
    )


def _draw(drawn: DrawnTokens, n: int, row: int, keys: np.ndarray, weights: int, sample: RunningSample) -> int:
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
    """Return a hash that is equal in all processes, unlike Python's hash of strings and bytes."""
    value = 0
    for part in parts:
        value = zlib.crc32(part if isinstance(part, bytes) else repr(part).encode(), value)
    return value
