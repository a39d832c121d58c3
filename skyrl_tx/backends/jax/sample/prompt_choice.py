"""Choose which waiting prompts are computed next, and on which shards."""

from collections.abc import Iterable, Sequence

from skyrl_tx.backends.jax.sample.prefill import Prefill, PrefillQueue
from skyrl_tx.backends.jax.sample.shard import SampleShard

ShardPrefill = tuple[Prefill, SampleShard]
"""A prompt and the shard that computes it."""

SHARD_LEAD = 8
"""A shard may have at most this many samples more than the emptiest shard to get another prompt.
Of these shards, the one with the longest cached prefix is chosen."""


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
