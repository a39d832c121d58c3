"""One shard of sampling: its rows and its part of the cache, and the prompts and samples that have them.

On one device, and on a mesh that does not shard rows, there is one. A sample takes pages of the cache for the next
slice when it needs them. If there are none, cached prefixes are evicted, then the sample with the fewest tokens is
preempted and recomputed later, on any shard.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from skyrl_tx.backends.jax.sample.block_table import BlockTableRow
from skyrl_tx.backends.jax.sample.kv_cache import KVCache
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.sample.prefill import Prefill, Prefiller, PrefillQueue
from skyrl_tx.backends.jax.sample.running_sample import RunningSample, SampleKey
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.ids import RequestId

SPARE_SLICES = 4
"""Slices of all running samples for which there must be pages before another sample begins.

With fewer, samples would be preempted soon after their start."""


class SampleShard:
    """The prompts and samples that have the rows, pages and states of a shard."""

    def __init__(
        self,
        number: int,
        programs: ModelRunner,
        memory: SampleMemory,
        shapes: PrefillShapes,
        slice_tokens: int,
        score_queue: PrefillQueue,
        sample_queue: PrefillQueue,
    ) -> None:
        """`memory` is that of the shard; the queues are those of all shards."""
        self._number = number
        self._memory = memory
        self._slice_tokens = slice_tokens
        self._score_queue = score_queue
        self._sample_queue = sample_queue
        self.cache = KVCache(programs, memory, shapes, number)
        self.prefiller = Prefiller(programs, shapes, self.cache)
        self.prefilled: deque[Prefill] = deque()
        """Computed prompts with samples that wait for rows or pages."""
        self.running: dict[SampleKey, RunningSample] = {}

    @property
    def num_rows(self) -> int:
        """How many samples may run."""
        return self._memory.num_slots

    @property
    def num_samples(self) -> int:
        """The samples that run, or wait for that here."""
        return len(self.running) + sum(len(prompt.samples) for prompt in self.prefilled)

    @property
    def is_open(self) -> bool:
        """Whether another sample may run, and none waits."""
        return not self.prefilled and len(self.running) < self.num_rows

    def fits(self, waiting: Prefill, besides: Sequence[Prefill] = ()) -> bool:
        """Return whether a prompt and its first sample fit, besides others that have no pages yet."""
        taken = sum(self._memory.count_pages(each.kv_length(self._slice_tokens)) for each in besides)
        spare, num_tokens = self._count_reserved_pages() + taken, waiting.kv_length(self._slice_tokens)
        return self.prefiller.fits(waiting, num_tokens, spare=spare, besides=len(besides))

    def can_run_ahead(self) -> bool:
        """Return whether the next slice has its pages for certain, and no sample waits."""
        most = len(self.running) * (self._slice_tokens // self._memory.page + 2)
        has_pages = self.cache.pages.num_free >= most or self.cache.fits(_sum_pages(self._find_missing_pages()))
        return has_pages and not self.prefilled

    def remove(self, key: SampleKey) -> None:
        """Remove a running sample and free what it has of the cache."""
        self.cache.release(self.running.pop(key).table)

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Remove all samples of requests that run, or wait for that here. Unknown ids are ignored."""
        for prompt in self.prefilled:
            if prompt.request.request_id in request_ids:
                prompt.samples.clear()
        self.drop_inserted()
        for key in [key for key in self.running if key[0] in request_ids]:
            self.remove(key)

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one sample that runs, or waits for that here. An unknown sample is ignored."""
        for prompt in self.prefilled:
            if prompt.request.request_id == request_id:
                prompt.samples = deque(sample for sample in prompt.samples if sample.index != index)
        self.drop_inserted()
        if (request_id, index) in self.running:
            self.remove((request_id, index))

    def take_pages_for_next_slice(self) -> None:
        """Take the pages of running samples, of which the one with the fewest tokens is preempted until they fit."""
        while True:
            missing = self._find_missing_pages()
            if self.cache.fits(_sum_pages(missing)):
                return self.cache.grow(missing)
            self._preempt()

    def insert(self) -> None:
        """Let as many samples of computed prompts run as there are rows and pages."""
        while self.prefilled and (num_rows := self.num_rows - len(self.running)):
            prompt = self.prefilled[0]
            size, needed = prompt.request.prompt.size, self._count_reserved_pages()
            lengths: list[int] = []
            for sample in islice(prompt.samples, num_rows):
                length = sample.length_after(self._slice_tokens)
                needed += self._memory.count_pages(length) - size // self._memory.page
                if not self.cache.fits(needed, len(lengths) + 1):
                    break
                lengths.append(length)
            if not lengths and self.running:
                return
            if not lengths:
                self._preempt(keep=prompt)
                continue
            assert prompt.table is not None
            for table in self.cache.fork(prompt.table, size, lengths):
                sample = prompt.samples.popleft()
                sample.table = table
                self.running[sample.key] = sample
            self.drop_inserted()

    def drop_inserted(self) -> None:
        """Free what computed prompts have whose samples all run."""
        for prompt in self.prefilled:
            if not prompt.samples:
                self.prefiller.drop(prompt)
        self.prefilled = deque(prompt for prompt in self.prefilled if prompt.samples)

    def _count_reserved_pages(self) -> int:
        """Return how many pages the running samples take within some slices."""
        return _sum_pages(self._find_missing_pages(SPARE_SLICES))

    def _find_missing_pages(self, num_slices: int = 1) -> list[tuple[BlockTableRow, int]]:
        """Return the tables of running samples that lack pages for their next slices, with the numbers of these.

        It is asked for each slice and all samples, so it calls nothing.
        """
        num_steps, page = num_slices * self._slice_tokens, self._memory.page
        return [
            (sample.table, -(-min(position, sample.end) // page) - num_pages)
            for sample in self.running.values()
            if (position := sample.position + num_steps) > (num_pages := len(sample.table.pages)) * page
            and sample.end > num_pages * page
        ]

    def _preempt(self, keep: Prefill | None = None) -> None:
        """Let what has the fewest tokens wait and free what it has of the cache: a partly computed prompt first.

        The last running sample, or the prompt `keep`, goes on when all others have been preempted.
        """
        samples, others = self.running.values(), [each for each in self.prefilled if each is not keep]
        if self._is_on_shard(self._sample_queue.current):
            self.prefiller.drop(self._sample_queue.requeue_current())
        elif len(samples) > 1:
            sample = min(samples, key=lambda sample: sample.num_drawn)
            self.remove(sample.key)
            self._sample_queue.preempt(sample)
        elif others:
            for sample in others[-1].samples:
                self._sample_queue.preempt(sample)
            others[-1].samples.clear()
            self.drop_inserted()
        else:
            assert self._is_on_shard(self._score_queue.current)
            self.prefiller.drop(self._score_queue.requeue_current())

    def _is_on_shard(self, prefill: Prefill | None) -> bool:
        return prefill is not None and prefill.table is not None and prefill.table.shard == self._number


def _sum_pages(missing: Iterable[tuple[BlockTableRow, int]]) -> int:
    return sum(num_pages for _, num_pages in missing)
