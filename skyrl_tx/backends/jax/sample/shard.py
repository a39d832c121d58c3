"""The shards of sampling, and the choice of the prompts that they compute next.

A shard has some of the rows, a part of the KV cache, and the prompts and samples in them.

A single device, or a mesh that does not shard rows, has one shard. A running sample takes pages for
its next slice when it needs them. If too few are free, the shard evicts cached prefixes. If this is
not enough, it preempts the sample with the fewest tokens, which is recomputed later on any shard.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from skyrl_tx.backends.jax.sample.kv_cache import KVCache
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.sample.prefill import Prefill, Prefiller, PrefillQueue
from skyrl_tx.backends.jax.sample.running_sample import BlockTableRow, RunningSample, SampleKey
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory
from skyrl_tx.contract.ids import RequestId

SPARE_SLICES = 4
"""Another sample starts only if there are pages for this number of slices of all running samples.

With fewer, samples would be preempted soon after their start.
"""
SHARD_LEAD = 8
"""A shard may have at most this many samples more than the emptiest shard to get another prompt.
Of these shards, the one with the longest cached prefix is chosen."""


class SampleShard:
    """The prompts and samples that use the rows, pages and states of one shard."""

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
        """`memory` is the memory of this shard. All shards share the two queues."""
        self._number = number
        self._memory = memory
        self._slice_tokens = slice_tokens
        self._score_queue = score_queue
        self._sample_queue = sample_queue
        self.cache = KVCache(programs, memory, shapes, number)
        self.prefiller = Prefiller(programs, shapes, self.cache)
        self.prefilled: deque[Prefill] = deque()
        """Computed prompts whose samples wait for rows or pages."""
        self.running: dict[SampleKey, RunningSample] = {}

    @property
    def num_rows(self) -> int:
        """The number of samples that may run at the same time."""
        return self._memory.num_slots

    @property
    def num_samples(self) -> int:
        """The number of samples that run or wait for a row here."""
        return len(self.running) + sum(len(prompt.samples) for prompt in self.prefilled)

    @property
    def is_open(self) -> bool:
        """Whether another sample may run, and none waits."""
        return not self.prefilled and len(self.running) < self.num_rows

    def fits(self, waiting: Prefill, batch: Sequence[Prefill] = ()) -> bool:
        """Return whether a prompt and its first sample fit, together with the prompts in `batch`.

        The prompts in `batch` have no pages yet.
        """
        taken = sum(self._memory.count_pages(prefill.kv_length(self._slice_tokens)) for prefill in batch)
        spare, num_tokens = self._count_reserved_pages() + taken, waiting.kv_length(self._slice_tokens)
        return self.prefiller.fits(waiting, num_tokens, spare=spare, num_others=len(batch))

    def can_run_ahead(self) -> bool:
        """Return whether the next slice is sure to get its pages, and no sample waits."""
        max_pages = len(self.running) * (self._slice_tokens // self._memory.page + 2)
        has_pages = self.cache.pages.num_free >= max_pages or self.cache.fits(_sum_pages(self._find_missing_pages()))
        return has_pages and not self.prefilled

    def remove(self, key: SampleKey) -> None:
        """Remove a running sample and free its pages and state."""
        self.cache.release(self.running.pop(key).table)

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Remove all samples of requests that run or wait here. Unknown ids are ignored."""
        for prompt in self.prefilled:
            if prompt.request.request_id in request_ids:
                prompt.samples.clear()
        self.drop_inserted()
        for key in [key for key in self.running if key[0] in request_ids]:
            self.remove(key)

    def end(self, request_id: RequestId, index: int) -> None:
        """Remove one sample that runs or waits here. Unknown samples are ignored."""
        for prompt in self.prefilled:
            if prompt.request.request_id == request_id:
                prompt.samples = deque(sample for sample in prompt.samples if sample.index != index)
        self.drop_inserted()
        if (request_id, index) in self.running:
            self.remove((request_id, index))

    def take_pages_for_next_slice(self) -> None:
        """Take the pages that running samples need, and preempt samples until the pages suffice."""
        while True:
            missing = self._find_missing_pages()
            if self.cache.fits(_sum_pages(missing)):
                return self.cache.grow(missing)
            self._preempt()

    def insert(self) -> None:
        """Start as many samples of computed prompts as there are rows and pages."""
        while self.prefilled and (num_rows := self.num_rows - len(self.running)):
            prompt = self.prefilled[0]
            size, needed = prompt.request.prompt.size, self._count_reserved_pages()

            # Count the samples whose pages and states fit.
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

            # Give each of these samples its pages and a row.
            assert prompt.table is not None
            for table in self.cache.fork(prompt.table, size, lengths):
                sample = prompt.samples.popleft()
                sample.table = table
                self.running[sample.key] = sample
            self.drop_inserted()

    def drop_inserted(self) -> None:
        """Free the computed prompts whose samples all run."""
        for prompt in self.prefilled:
            if not prompt.samples:
                self.prefiller.drop(prompt)
        self.prefilled = deque(prompt for prompt in self.prefilled if prompt.samples)

    def _count_reserved_pages(self) -> int:
        """Return how many pages the running samples need within SPARE_SLICES slices."""
        return _sum_pages(self._find_missing_pages(SPARE_SLICES))

    def _find_missing_pages(self, num_slices: int = 1) -> list[tuple[BlockTableRow, int]]:
        """Return the tables that lack pages for the next slices, with the number missing.

        This runs for every slice over all samples, so it is written without calls.
        """
        num_steps, page = num_slices * self._slice_tokens, self._memory.page
        return [
            (sample.table, -(-min(position, sample.end) // page) - num_pages)
            for sample in self.running.values()
            if (position := sample.position + num_steps) > (num_pages := len(sample.table.pages)) * page
            and sample.end > num_pages * page
        ]

    def _preempt(self, keep: Prefill | None = None) -> None:
        """Free the pages of one prompt or sample, and put it back into its queue.

        A partly computed prompt comes first, then the running sample with the fewest tokens.

        The last running sample, or the prompt `keep`, continues when everything else is preempted.
        """
        samples, others = self.running.values(), [prompt for prompt in self.prefilled if prompt is not keep]
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


ShardPrefill = tuple[Prefill, SampleShard]
"""A prompt and the shard that computes it."""


class PromptChooser:
    """Chooses prompts in order of arrival. They start when there are enough pages for them."""

    def __init__(self, shards: Sequence[SampleShard], sample_queue: PrefillQueue, prompts_of_shard: int) -> None:
        """Prompts of `sample_queue` need a row for their samples.

        `prompts_of_shard` is how many prompts a shard computes at the same time.
        """
        self._shards = shards
        self._sample_queue = sample_queue
        self._prompts_of_shard = prompts_of_shard
        self._blocked: PrefillQueue | None = None  # the queue whose next prompt did not fit, in this or the last round

    def order_queues(self, queues: Iterable[PrefillQueue]) -> list[PrefillQueue]:
        """Begin a round. Returns the queues. A queue that was blocked in the last round comes first."""
        first, self._blocked = self._blocked, None
        return sorted(queues, key=lambda queue: queue is not first)

    def take_next(self, queue: PrefillQueue, budget: int) -> list[ShardPrefill]:
        """Take the next prompts to compute at the same time from a queue.

        Returns an empty list if none fits.
        """
        chosen = self._find_next(queue, budget)
        if chosen is None:
            return []
        prompts = [self._take_from_queue(queue, *chosen)]

        # Add prompts to compute at the same time. Only a single prompt may be computed partly.
        max_prompts = len(self._shards) * self._prompts_of_shard
        while len(prompts) < max_prompts and prompts[0][0].request.prompt.size <= budget:
            chosen = self._find_next(queue, budget, batch=prompts)
            if chosen is None:
                break
            prompts.append(self._take_from_queue(queue, *chosen))
        return prompts

    def _find_next(self, queue: PrefillQueue, budget: int, batch: Sequence[ShardPrefill] = ()) -> ShardPrefill | None:
        """Return the next prompt to compute and its shard, or None if no prompt fits.

        This is the oldest waiting prompt. While another prompt of the queue is partly computed, it
        is the oldest prompt that fits into the budget.

        `batch` has the prompts that were already chosen for the same prefill. The next prompt must
        fit into the budget together with the prompts of `batch` on its shard, and it must not share
        more of its prefix with one of them than is cached. Otherwise it should wait for that prompt
        and reuse its keys.
        """
        for waiting in queue.iter_waiting():
            size = waiting.request.prompt.size
            if queue.current is not None and size > budget:
                continue
            shards = [shard for shard in self._shards if not batch or self._can_join(shard, waiting, budget, batch)]
            if queue is self._sample_queue:
                shards = [shard for shard in shards if shard.is_open]

            if self._blocked:
                fitting = []
            else:
                fitting = [shard for shard in shards if shard.fits(waiting, _filter_by_shard(shard, batch))]
            if fitting:
                return waiting, self._choose_shard(fitting, waiting)
            if shards and not batch:  # this queue comes first in the next round, and blocks the other queue until then
                self._blocked = self._blocked or queue
            return None
        return None

    def _can_join(self, shard: SampleShard, waiting: Prefill, budget: int, batch: Sequence[ShardPrefill]) -> bool:
        """Return whether a shard can compute a whole prompt together with the prompts in `batch`."""
        own = _filter_by_shard(shard, batch)
        num_tokens = sum(prefill.request.prompt.size for prefill in [waiting, *own])
        is_free = len(own) < self._prompts_of_shard and num_tokens <= budget
        return is_free and not any(shard.prefiller.can_share(waiting, prefill) for prefill in own)

    def _take_from_queue(self, queue: PrefillQueue, waiting: Prefill, shard: SampleShard) -> ShardPrefill:
        """Take a prompt from its queue, with at most as many samples as the shard has rows.

        The other samples of the request go back to the queue, because they could run on another
        shard at once. With one shard, all samples stay together.
        """
        queue.remove(waiting)
        if queue is self._sample_queue and len(self._shards) > 1 and (rest := waiting.split(shard.num_rows)):
            queue.requeue_first(rest)
        return waiting, shard

    def _choose_shard(self, fitting: Sequence[SampleShard], waiting: Prefill) -> SampleShard:
        """Return the shard for a prompt.

        Prefers a long cached prefix, then few samples, then many free pages.
        """
        if len(fitting) == 1:
            return fitting[0]
        fewest = min(shard.num_samples for shard in fitting)
        near = (shard for shard in fitting if shard.num_samples <= fewest + SHARD_LEAD)
        return max(
            near,
            key=lambda shard: (shard.prefiller.count_cached(waiting), -shard.num_samples, shard.cache.pages.num_free),
        )


def _filter_by_shard(shard: SampleShard, placed: Sequence[ShardPrefill]) -> list[Prefill]:
    """Return the prompts that a shard computes."""
    return [prefill for prefill, other in placed if other is shard]
