"""A decode slice that was dispatched, and what its samples drew once the host reads it.

Legend: S rows, N steps, K top tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.distributed import fetch
from skyrl_tx.backends.jax.sample.programs import SliceResult
from skyrl_tx.backends.jax.sample.rows import Rows
from skyrl_tx.backends.jax.sample.running import RunningSample
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.results import TopK

RowDrawn = tuple[RunningSample, int, Int32Array, Float32Array, bool, TopK | None]
"""A sample, and what a slice drew of it: the arguments of `RunningSample.take_slice`."""


@dataclass(frozen=True, slots=True)
class SlicePart:
    """The rows of one call of the program."""

    rows: Rows
    start_S: Any
    """KV positions in use before the slice, int32 on the host."""
    result: SliceResult
    wants_topk: bool


class DispatchedSlice:
    """Rows that devices compute, or have computed."""

    def __init__(self, parts: Sequence[SlicePart], guarded: Callable[[], AbstractContextManager[None]]) -> None:
        """Errors of the devices are raised where results are read, inside a context that `guarded` makes."""
        self._parts = parts
        self._guarded = guarded

    def read(self) -> Iterator[RowDrawn]:
        """Wait for the devices, and yield what each sample drew. Raises BackendLost if the cache is lost."""
        for part in self._parts:
            yield from self._read(part)

    def _read(self, part: SlicePart) -> Iterator[RowDrawn]:
        drawn = part.result.drawn
        topk = (drawn.topk_tokens, drawn.topk_logprobs) if part.wants_topk else None
        with self._guarded():
            found = fetch((drawn.tokens, drawn.logprobs, part.result.num_S, part.result.is_stopped_S, topk))
        tokens_NS, logprobs_NS, num_S, is_stopped_S, topk = found
        tokens_SN, logprobs_SN = (list(np.ascontiguousarray(each.T)) for each in (tokens_NS, logprobs_NS))
        rows = zip(part.rows.samples, part.start_S.tolist(), num_S.tolist(), is_stopped_S.tolist(), strict=True)
        for row, (sample, start, num, is_stopped) in enumerate(rows):
            if sample is None:
                continue
            tokens_N, logprobs_N = tokens_SN[row], logprobs_SN[row]
            if num < len(tokens_N):
                tokens_N, logprobs_N = tokens_N[:num], logprobs_N[:num]
            # Copies, so that a delta does not keep all rows in memory.
            tokens_N, logprobs_N = tokens_N.copy(), logprobs_N.copy()
            own = None
            if topk is not None and (k := sample.request.options.sample_topk):
                own = TopK(token_ids=topk[0][:num, row, :k].copy(), logprobs=topk[1][:num, row, :k].copy())
            yield sample, start, tokens_N, logprobs_N, is_stopped, own
