"""CPU time of the host for each decode slice, with devices that take none.

The scheduler of the JAX backend runs samples whose tokens a stub returns at once. `inputs` is the part before the
program is called, during which a device would wait; the rest hands the tokens of the slice before to the engine, and
takes pages for the next one. All samples take a page for the same slice, one in several, which only the mean has.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from benchmarks.common import report
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.draw import DrawnTokens
from skyrl_tx.backends.jax.sample.programs import SliceResult
from skyrl_tx.backends.jax.sample.row_inputs import RowInputs, iter_copy_arguments
from skyrl_tx.backends.jax.sample.running_sample import RunningSample
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.sample.slice_rows import DispatchedSlice, SlicePart, SliceRows
from skyrl_tx.backends.jax.shapes import SampleMemory
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import begin, make_prompt, make_request

LENGTH, TOKEN = 4096, 7


class InstantPrograms(FakeModelRunner):
    """Makes the inputs of a slice as the JAX programs do on an accelerator, and draws one token again and again."""

    def __init__(self, num_slots: int, slice_tokens: int) -> None:
        super().__init__(runs_ahead=True)
        self._num_slots = num_slots
        shape = slice_tokens, num_slots
        drawn = DrawnTokens(np.full(shape, TOKEN, np.int32), np.zeros(shape, np.float32), np.zeros(0), np.zeros(0))
        num_S = np.full(num_slots, slice_tokens, np.int32)
        self._result = SliceResult(drawn, num_S, is_stopped_S=np.zeros(num_slots, bool))  # type: ignore[arg-type]
        self._inputs = RowInputs(slice_tokens)
        self.inputs_s: list[float] = []
        """The CPU time of making the inputs of each slice."""
        self.is_measured = False
        """Whether prompts have ended, which read what was copied."""

    def dispatch(self, samples: Sequence[RunningSample], num_steps: int) -> DispatchedSlice:  # type: ignore[override]
        started = time.thread_time()
        rows = SliceRows.arrange(samples, self._num_slots, merges=True)
        self._inputs.make_table(rows, self._memory.table_pages)
        batch = self._inputs.make_batch(rows, from_last=True)
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                sample.row = row
        self.inputs_s.append(time.thread_time() - started)
        part = SlicePart(rows, batch.position_S, self._result, wants_topk=False)
        return DispatchedSlice([part], nullcontext)

    def copy(self, pages: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]], shard: int = 0) -> None:
        if not self.is_measured:
            super().copy(pages, states, shard)
        list(iter_copy_arguments(pages, states, shard, num_shards=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256, help="samples that run at the same time")
    parser.add_argument("--slice-tokens", type=int, default=16, help="steps of a slice")
    parser.add_argument("--slices", type=int, default=100, help="slices that are measured")
    options = parser.parse_args()

    num_slots = options.slots
    memory = SampleMemory(num_slots=num_slots, tokens=num_slots * LENGTH, prefix_tokens=0, max_length=LENGTH)
    config = JaxConfig(sample_slots=num_slots, decode_slice_tokens=options.slice_tokens).with_platform_defaults("cpu")
    device = InstantPrograms(num_slots, options.slice_tokens)
    scheduler = SampleScheduler(device, config, memory, ())  # type: ignore[arg-type]
    max_tokens = options.slice_tokens * (options.slices + 20) + 1
    begin(
        scheduler,
        *(make_request(f"r{i}", make_prompt(20, seed=i + 1), max_tokens=max_tokens) for i in range(num_slots)),
    )

    # Step until all slots decode.
    while scheduler.meters().decode_slots_used != num_slots:
        scheduler.step()
    scheduler.step()  # the first slice of these rows

    device.inputs_s.clear()
    device.is_measured = True
    slices_s: list[float] = []
    for _ in range(options.slices):
        started = time.thread_time()
        scheduler.step()
        slices_s.append(time.thread_time() - started)

    results = {
        name: round(1e3 * seconds, 3)
        for name, seconds in (
            ("slice_cpu_ms", statistics.median(slices_s)),
            ("slice_cpu_ms_mean", statistics.fmean(slices_s)),
            ("inputs_cpu_ms", statistics.median(device.inputs_s)),
        )
    }

    report("scheduler", options, results, ("numpy", "jax"))


if __name__ == "__main__":
    main()
