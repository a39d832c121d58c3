"""KV cache slots: which sample runs in which slot, and the layout of the cache.

A slot is as long as running samples need now, not as long as they may become: most samples end early. When a sample
reaches the end of its slot, the cache is reallocated with half as many slots of twice the length. Samples that stay
move through host memory, a few positions at a time, so that the device never holds the cache twice.
"""

from collections import deque
from collections.abc import Collection

from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.running import BASE, PromptKV, RunningSample
from skyrl_tx.backends.jax.shapes import KVLayout, tiles
from skyrl_tx.contract.errors import BackendLost


class Slots:
    """The sample in each slot. A slot is free as soon as its sample has ended.

    Samples of one adapter are kept together, so that most tiles use a single adapter.
    """

    def __init__(self, num_slots: int) -> None:
        self._samples: list[RunningSample | None] = [None] * num_slots
        self._tiles = tiles(num_slots)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def free(self) -> list[int]:
        """The free slots in ascending order."""
        return [slot for slot, sample in enumerate(self._samples) if sample is None]

    @property
    def live(self) -> dict[int, RunningSample]:
        """The samples by slot."""
        return {slot: sample for slot, sample in enumerate(self._samples) if sample is not None}

    @property
    def adapters(self) -> list[int]:
        """The adapter slot of each tile; of each slot if any tile has several."""
        by_tile = [self._adapters_in(tile) or {BASE} for tile in self._tiles]
        if all(len(adapters) == 1 for adapters in by_tile):
            return [adapter for adapters in by_tile for adapter in adapters]
        return [BASE if sample is None else sample.adapter for sample in self._samples]

    def free_for(self, adapter: int) -> list[int]:
        """Return the free slots, best first: in tiles of this adapter alone, in empty tiles, in other tiles."""

        def cost(tile: range) -> int:
            present = self._adapters_in(tile)
            return 0 if present == {adapter} else 2 if present else 1

        return [slot for tile in sorted(self._tiles, key=cost) for slot in tile if self._samples[slot] is None]

    def _adapters_in(self, tile: range) -> set[int]:
        return {sample.adapter for slot in tile if (sample := self._samples[slot]) is not None}

    def occupy(self, sample: RunningSample, slot: int) -> None:
        """Put a sample into a free slot."""
        assert self._samples[slot] is None and sample.stop_reason is None
        self._samples[slot] = sample

    def release(self, slot: int) -> None:
        """Free a slot whose sample has ended, was cancelled or is preempted."""
        assert self._samples[slot] is not None
        self._samples[slot] = None


class KVCache:
    """The host's view of the KV cache: its layout and its slots. The arrays belong to the programs."""

    def __init__(self, programs: JaxPrograms, layout: KVLayout) -> None:
        self._programs = programs
        self.layout = layout
        self.slots = Slots(self.layout.num_slots)
        programs.allocate_cache(layout)

    def insert(self, prompt: PromptKV, samples: deque[RunningSample]) -> None:
        """Move as many samples as possible from the deque into free slots, each with a copy of the prompt's keys."""
        taken = self.slots.free_for(samples[0].adapter)[: len(samples)]
        if not taken:
            return
        self._programs.insert(prompt, samples[0].position, taken)
        for slot in taken:
            self.slots.occupy(samples.popleft(), slot)

    def reallocate(self, layout: KVLayout, keep: Collection[int] = ()) -> None:
        """Change the layout. Samples of the slots in `keep` continue in slots of the new layout; all others are lost.

        Raises BackendLost when the device fails in between.
        """
        kept = [(sample := self.slots.live[slot], self._programs.read_slot(slot, sample.position)) for slot in keep]
        try:
            self._programs.allocate_cache(layout)
            self.layout, self.slots = layout, Slots(layout.num_slots)
            for sample, saved in kept:
                slot = self.slots.free_for(sample.adapter)[0]
                self._programs.write_slot(saved, slot)
                self.slots.occupy(sample, slot)
        except Exception as error:
            raise BackendLost(f"the KV cache could not be reallocated: {error}") from error
